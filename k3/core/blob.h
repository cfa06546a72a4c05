#pragma once
// Blob: bytes written in order and read back in the same order, with a name on each part, so that a reader that expects something else
// says so. States travel in it (fork, save, hand-over).
#include <cstring>
#include <string>
#include <vector>

#include "k3/core/error.h"
#include "k3/core/tensor.h"

namespace k3 {

class Blob {
 public:
  std::vector<char> bytes;

  void put(const char* name, const void* data, size_t n) {
    uint32_t name_size = uint32_t(std::strlen(name));
    uint64_t size = n;
    append(&name_size, sizeof name_size), append(name, name_size), append(&size, sizeof size), append(data, n);
  }
  template <class T>
  void put_value(const char* name, const T& v) {
    put(name, &v, sizeof v);
  }
  void get(const char* name, void* data, size_t n) {
    uint32_t name_size = 0;
    read(&name_size, sizeof name_size, name);
    K3_CHECK(name_size < 256, "[state] expected part {} but the bytes are damaged", name);
    std::string found(name_size, ' ');
    read(found.data(), name_size, name);
    uint64_t size = 0;
    read(&size, sizeof size, name);
    K3_CHECK(found == name && size == n, "[state] expected part {} of {} bytes, found {} of {}", name, n, found, size);
    read(data, n, name);
  }
  template <class T>
  T get_value(const char* name) {
    T v;
    get(name, &v, sizeof v);
    return v;
  }
  bool at_end() const { return at_ == bytes.size(); }

 private:
  void append(const void* p, size_t n) { bytes.insert(bytes.end(), static_cast<const char*>(p), static_cast<const char*>(p) + n); }
  void read(void* p, size_t n, const char* name) {
    K3_CHECK(at_ + n <= bytes.size(), "[state] the bytes end before part {}", name);
    if (n) std::memcpy(p, bytes.data() + at_, n);
    at_ += n;
  }
  size_t at_ = 0;
};

}  // namespace k3
