#pragma once
// ExpertCache: a model's routed experts in a fixed number of slots, read from the snapshot's files when a step wants them.
//
//   ExpertCache cache(model, snapshot, find_parameters(model, snapshot));       // both must outlive it
//   cache.allocate({.slots = budget / cache.slot_bytes()});                     // from here on the model's experts come from it
//   load(model, snapshot, {});                                                  // leaves them alone
//   ... sessions as always: their answers are those of the model in memory, to the bit ...
//
// A slot holds one expert's matrices as they are stored. `readers` threads read, past the page cache where the file system can (O_DIRECT), so
// that a byte is in memory once and what is called disk is the disk. While some experts are read, the ones that are there are multiplied.
// What leaves: the expert least used of late (use counts halve every kHalfLife tokens); among equals, the one whose layer comes last, since
// layers come in turns. What is read ahead: the next layer's experts of the token before, as long as tokens repeat their experts at all.
//
// Errors, from take(), name the file and the tensor: a file that was cut or cannot be read, a scale of 255. The cache and the model stay usable.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "k3/core/buffer.h"
#include "k3/model/checkpoint.h"

namespace k3 {

class ExpertCache {
 public:
  struct Options {
    int64_t slots = 1;
    int readers = 4;
    bool read_ahead = true;
  };
  // Since the cache was made. A wanted expert that was in memory, or on its way because it was read ahead, is a hit.
  struct Counts {
    int64_t wanted = 0, hits = 0, ahead = 0, ahead_used = 0;
    uint64_t bytes = 0;  // read from files
    double waited = 0;   // seconds in which nothing could be multiplied
    Counts operator-(const Counts& o) const;
  };

  ExpertCache(Model& model, const Snapshot& snapshot, const std::vector<StoredParam>& found);
  ~ExpertCache();
  ExpertCache(const ExpertCache&) = delete;
  ExpertCache& operator=(const ExpertCache&) = delete;

  void allocate(const Options& options);  // once
  double fill(uint64_t bytes);            // reads experts of all layers into empty slots until so much is read; the seconds it took
  // Reads the scales of all experts, and nothing else of them, and looks for a 255, so that a damaged file is refused before the first token and not
  // when its expert is wanted. They are 1/17 of MXFP4 experts: 85 of K3's 1,446 GB. Error as from take(). `progress` is told bytes, by one thread.
  void check_scales(const std::function<void(uint64_t done, uint64_t total)>& progress = nullptr) const;
  Counts counts() const;
  double repeats() const;  // share of a token's experts that the token before wanted too, lately
  bool direct() const { return direct_; }
  int64_t experts() const { return int64_t(experts_.size()); }
  int64_t slots() const { return int64_t(held_by_.size()); }
  uint64_t slot_bytes() const { return slot_bytes_; }

 private:
  static constexpr double kHalfLife = 16, kWorthReadingAhead = 0.2;
  enum class State : uint8_t { absent, queued, reading, ready };
  struct Run {  // bytes that lie together in a file
    uint32_t file;
    uint64_t from, bytes, at;  // in the file; in the slot
  };
  struct Expert {
    Param* params[3];  // w1, w2, w3
    StoredParam stored[3];
    uint64_t value_at[3] = {}, scale_at[3] = {};  // in the slot
    std::vector<Run> runs;
    int32_t layer = 0, slot = -1;
    State state = State::absent;
    bool wanted = false;  // in the running step; not to be replaced
    bool ahead = false;   // read before it was wanted
    double use = 0;       // grows by growth_ each time
    std::string fault;
  };
  class Layer;
  struct File {
    std::string path;
    uint32_t shard = 0;
    int fd = -1, direct = -1;
    uint64_t data = 0;  // where the data begins
  };

  static uint64_t lay_out(Expert& e, const Snapshot& snapshot, const std::map<std::string, uint32_t>& files, const std::vector<File>& opened);
  static void point(Expert& e, char* slot);
  Expert& of(int32_t layer, int32_t i) { return experts_[size_t(first_of_layer_[size_t(layer)] + i)]; }
  double worth(const Expert& e) const;
  bool give_slot(Expert& e, bool ahead);  // finds one and queues the reading
  void leave(Expert& e);
  void want(int32_t layer, std::span<const int32_t> experts);
  std::span<const int32_t> take(int32_t layer);
  void give_waiting();
  void hand_back();  // the last take()'s
  void forget();     // what an earlier step left
  void read_loop();
  const char* read_run(const File& f, uint64_t from, uint64_t bytes, char* to, std::initializer_list<const StoredTensor*> tensors) const;
  uint64_t read(const Expert& e, char* slot) const;

  std::vector<Expert> experts_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<int32_t> first_of_layer_;
  std::vector<File> files_;
  uint64_t slot_bytes_ = 0;
  bool direct_ = true, read_ahead_ = true;
  Buffer memory_;
  std::vector<int32_t> held_by_;  // slot -> expert, or -1

  mutable std::mutex mutex_;  // of what follows, and of states
  std::condition_variable work_, done_;
  std::deque<int32_t> demand_, ahead_;  // to be read
  std::vector<int32_t> waiting_;        // wanted, and no slot was free; numbers within the layer, as handed_'s
  std::vector<int32_t> handed_;
  int64_t left_ = 0;      // wanted and not handed out
  int32_t current_ = -1;  // layer of the running step
  double growth_ = 1, repeats_ = 0;
  Counts counts_;
  bool stop_ = false;
  std::vector<std::thread> readers_;
};

}  // namespace k3
