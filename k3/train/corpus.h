#pragma once
// Corpus: the files that a run learns from, and the documents in them. Bytes are data: nothing needs to be UTF-8, and nothing is held
// in memory but a few megabytes, however long a line or a document is.
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

struct Source {
  std::string path;  // absolute
  uint64_t bytes = 0;
  int64_t modified = 0;   // nanoseconds
  uint64_t checksum = 0;  // of the content; known once it was read
};

// The regular files among `paths` and below the folders among them, each folder's in order of name. Files below `except` (the run's own
// folder) are left out. Errors: a path that is not there, no file at all, nothing but empty files.
std::vector<Source> list_sources(const std::vector<std::string>& paths, const std::string& except = "");

struct DocumentSink {
  // A document arrives in parts, each but the last of exactly the characters that the tokenizer looks at together, so that the ids of the
  // parts are those of the whole.
  std::function<void(std::string_view part)> text;
  std::function<void()> end;
  std::function<void(uint64_t bytes)> progress;  // read so far, of all sources together; may be empty
};
// Reads all documents in order and fills in each source's checksum. Empty documents are left out; a separator line belongs to none.
// Error: a file whose size or time changed while it was read.
void read_documents(std::vector<Source>& sources, const std::string& separator, const DocumentSink& sink);

uint64_t checksum_of_file(const std::string& path);

}  // namespace k3
