#include "k3/infer/expert_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <utility>

#include "k3/core/error.h"
#include "k3/model/loading.h"

namespace k3 {

namespace {

constexpr uint64_t kPage = 4096;  // what direct reads are aligned to, in the file and in memory

double seconds_since(std::chrono::steady_clock::time_point t) { return std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count(); }

}  // namespace

class ExpertCache::Layer : public ExpertSource {
 public:
  Layer(ExpertCache& cache, int32_t number, ExpertWeights& weights) : weights(weights), cache_(cache), number_(number) {}
  ~Layer() override {
    if (weights.source == this) weights.source = nullptr;
  }
  void want(std::span<const int32_t> experts) override { cache_.want(number_, experts); }
  std::span<const int32_t> take() override { return cache_.take(number_); }

  ExpertWeights& weights;
  std::vector<int32_t> wanted;  // in the last step

 private:
  ExpertCache& cache_;
  int32_t number_;
};

ExpertCache::Counts ExpertCache::Counts::operator-(const Counts& o) const {
  return {wanted - o.wanted, hits - o.hits, ahead - o.ahead, ahead_used - o.ahead_used, bytes - o.bytes, waited - o.waited};
}

// Lays an expert's tensors out in a slot: what lies together in a file stays together and is one read. A run begins as far into a page as it
// does in the file, so that direct reads fit. Returns the bytes of the slot.
uint64_t ExpertCache::lay_out(Expert& e, const Snapshot& snapshot, const std::map<std::string, uint32_t>& files, const std::vector<File>& opened) {
  struct Piece {
    const StoredTensor* t;
    uint64_t* at;
  };
  std::vector<Piece> pieces;
  for (int i = 0; i < 3; ++i) {
    pieces.push_back({e.stored[i].value, &e.value_at[i]});
    if (e.stored[i].scale) pieces.push_back({e.stored[i].scale, &e.scale_at[i]});
  }
  std::sort(pieces.begin(), pieces.end(),
            [&](const Piece& a, const Piece& b) { return std::pair(a.t->shard, a.t->offset) < std::pair(b.t->shard, b.t->offset); });
  uint64_t end = 0;
  for (const Piece& p : pieces) {
    const uint32_t file = files.at(snapshot.file_of(*p.t));
    const uint64_t from = opened[file].data + p.t->offset;
    if (!e.runs.empty() && e.runs.back().file == file && e.runs.back().from + e.runs.back().bytes == from) {
      *p.at = end;
      e.runs.back().bytes += p.t->bytes;
    } else {
      *p.at = (end + kPage - 1) / kPage * kPage + from % kPage;
      e.runs.push_back({file, from, p.t->bytes, *p.at});
    }
    end = *p.at + p.t->bytes;
    K3_CHECK(*p.at % bytes_of(p.t->dtype) == 0, "[experts] {} in {} lies at byte {}, which no {} may; save the snapshot again", p.t->name,
             snapshot.file_of(*p.t), from, name_of(p.t->dtype));
  }
  return (end + kPage - 1) / kPage * kPage;
}

ExpertCache::ExpertCache(Model& model, const Snapshot& snapshot, const std::vector<StoredParam>& found) {
  std::unordered_map<const Param*, StoredParam> stored;
  std::map<std::string, uint32_t> files;
  size_t next = 0;
  for (const Param& p : model.params().all()) {
    const StoredParam& at = found[next++];
    if (!is_routed_expert(p.name)) continue;
    stored.emplace(&p, at);
    for (const StoredTensor* t : {at.value, at.scale})
      if (t && files.emplace(snapshot.file_of(*t), uint32_t(files_.size())).second) files_.push_back({snapshot.file_of(*t), t->shard});
  }
  for (File& f : files_) {
    f.fd = open(f.path.c_str(), O_RDONLY | O_CLOEXEC);
    K3_CHECK(f.fd >= 0, "[experts] cannot open {}: {}", f.path, std::strerror(errno));
    uint64_t header = 0;
    K3_CHECK(pread(f.fd, &header, 8, 0) == 8, "[experts] cannot read {}", f.path);
    f.data = 8 + header;
    f.direct = open(f.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    direct_ = direct_ && f.direct >= 0;
  }
  for (int64_t l = 0; l < model.layers(); ++l) {
    ExpertWeights* w = expert_weights(model.ffn(l));
    if (!w) continue;
    const int32_t number = int32_t(layers_.size());
    first_of_layer_.push_back(int32_t(experts_.size()));
    layers_.push_back(std::make_unique<Layer>(*this, number, *w));
    for (size_t i = 0; i < w->gate.size(); ++i) {
      Expert& e = experts_.emplace_back();
      e.layer = number;
      Param* params[] = {w->gate[i], w->down[i], w->up[i]};
      for (int j = 0; j < 3; ++j) {
        e.params[j] = params[j], e.stored[j] = stored.at(params[j]);
        const StoredTensor& t = *e.stored[j].value;
        K3_CHECK(e.stored[j].scale || t.dtype == DType::f32 || t.dtype == DType::bf16,
                 "[experts] {} in {} is {}; experts that are read while the model runs must be MXFP4, BF16 or F32", t.name, snapshot.file_of(t),
                 name_of(t.dtype));
      }
      slot_bytes_ = std::max(slot_bytes_, lay_out(e, snapshot, files, files_));
    }
  }
  K3_CHECK(!layers_.empty(), "[experts] this model has no routed experts");
}

void ExpertCache::allocate(const Options& options) {
  assert(readers_.empty() && options.slots >= 1 && options.readers >= 1);
  read_ahead_ = options.read_ahead;
  for (Expert& e : experts_) point(e, nullptr);
  for (auto& layer : layers_) layer->weights.source = layer.get();
  memory_ = Buffer(size_t(options.slots) * slot_bytes_);
  held_by_.assign(size_t(options.slots), -1);
  for (int i = 0; i < options.readers; ++i) readers_.emplace_back([this] { read_loop(); });
}

ExpertCache::~ExpertCache() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& t : readers_) t.join();
  for (const File& f : files_)
    for (int fd : {f.fd, f.direct})
      if (fd >= 0) close(fd);
  if (!held_by_.empty())
    for (Expert& e : experts_) point(e, nullptr);
}

// The parameters of an expert look at `slot`; null: at nothing, but keep shape and type.
void ExpertCache::point(Expert& e, char* slot) {
  for (int i = 0; i < 3; ++i) {
    const auto& [value, scale] = e.stored[i];
    e.params[i]->value = Tensor(slot ? slot + e.value_at[i] : nullptr, value->dtype, value->shape);
    e.params[i]->scales_checked = slot != nullptr;  // by read()
    if (scale) e.params[i]->scale = Tensor(slot ? slot + e.scale_at[i] : nullptr, scale->dtype, scale->shape);
  }
}

// ---- which experts stay. The lock is held.

// Whole halves of powers of two of the decayed use; below that, how soon the expert's layer comes.
double ExpertCache::worth(const Expert& e) const {
  const int32_t layers = int32_t(layers_.size());
  const double steps_away = (e.layer - current_ - 1 + 2 * layers) % layers + 1;
  return std::floor(2 * std::log2(e.use / growth_ + 1e-9)) + 1 - steps_away / (layers + 1);
}

bool ExpertCache::give_slot(Expert& e, bool ahead) {
  int32_t slot = -1;
  double least = ahead ? worth(e) : std::numeric_limits<double>::infinity();
  for (size_t s = 0; s < held_by_.size(); ++s) {
    if (held_by_[s] < 0) {
      slot = int32_t(s);
      break;
    }
    const Expert& held = experts_[size_t(held_by_[s])];
    const bool not_begun = held.state == State::queued && held.ahead && !ahead;
    if ((held.state != State::ready && !not_begun) || held.wanted) continue;
    if (double w = worth(held); w < least) least = w, slot = int32_t(s);
  }
  if (slot < 0) return false;
  if (int32_t old = held_by_[size_t(slot)]; old >= 0) leave(experts_[size_t(old)]);
  const int32_t number = int32_t(&e - experts_.data());
  held_by_[size_t(slot)] = number;
  e.slot = slot, e.state = State::queued, e.ahead = ahead;
  (ahead ? ahead_ : demand_).push_back(number);
  return true;
}

void ExpertCache::leave(Expert& e) {
  if (e.state == State::queued && e.ahead) std::erase(ahead_, int32_t(&e - experts_.data()));
  held_by_[size_t(e.slot)] = -1;
  e.slot = -1, e.state = State::absent, e.ahead = false;
}

// ---- a step

void ExpertCache::hand_back() {
  for (int32_t i : handed_) {
    Expert& e = of(current_, i);
    e.wanted = false;
    point(e, nullptr);
  }
  handed_.clear();
}

void ExpertCache::forget() {
  hand_back();
  if (current_ >= 0)
    for (int32_t i : layers_[size_t(current_)]->wanted) of(current_, i).wanted = false;
  for (int32_t i : demand_) leave(experts_[size_t(i)]);
  demand_.clear();
  waiting_.clear();
  left_ = 0;
}

void ExpertCache::want(int32_t layer, std::span<const int32_t> experts) {
  std::lock_guard lock(mutex_);
  forget();
  if (layer <= current_) growth_ *= std::exp2(1 / kHalfLife);  // a new token, or a new run of them
  if (growth_ > 1e100) {
    for (Expert& e : experts_) e.use /= growth_;
    growth_ = 1;
  }
  current_ = layer;
  std::vector<int32_t>& before = layers_[size_t(layer)]->wanted;
  if (!before.empty() && !experts.empty()) {
    const int64_t again =
        std::count_if(experts.begin(), experts.end(), [&](int32_t i) { return std::binary_search(before.begin(), before.end(), i); });
    repeats_ += 0.02 * (double(again) / double(experts.size()) - repeats_);
  }
  before.assign(experts.begin(), experts.end());
  left_ = int64_t(experts.size());
  counts_.wanted += left_;
  for (int32_t i : experts) {
    Expert& e = of(layer, i);
    e.wanted = true, e.use += growth_, e.fault.clear();
    if (e.state == State::absent) {
      waiting_.push_back(i);
      continue;
    }
    ++counts_.hits;
    counts_.ahead_used += e.ahead;
    if (e.state == State::queued) {  // read ahead, but not begun
      const int32_t number = int32_t(&e - experts_.data());
      std::erase(ahead_, number);
      demand_.push_back(number);
    }
    e.ahead = false;
  }
  give_waiting();
  const int32_t next = (layer + 1) % int32_t(layers_.size());
  const std::vector<int32_t>& likely = layers_[size_t(next)]->wanted;  // a long prompt's are no guess
  if (read_ahead_ && repeats_ > kWorthReadingAhead && waiting_.empty() && int64_t(likely.size()) * 4 <= slots())
    for (int32_t i : likely)
      if (Expert& e = of(next, i); e.state == State::absent) {
        if (!give_slot(e, true)) break;
        ++counts_.ahead;
      }
  work_.notify_all();
}

void ExpertCache::give_waiting() {
  size_t n = 0;
  while (n < waiting_.size() && give_slot(of(current_, waiting_[n]), false)) ++n;
  waiting_.erase(waiting_.begin(), waiting_.begin() + std::ptrdiff_t(n));
  if (n) work_.notify_all();
}

std::span<const int32_t> ExpertCache::take(int32_t layer) {
  std::unique_lock lock(mutex_);
  assert(layer == current_);
  hand_back();
  while (left_ > 0) {
    give_waiting();
    for (int32_t i : layers_[size_t(layer)]->wanted) {
      Expert& e = of(layer, i);
      if (e.wanted && !e.fault.empty()) {
        const std::string fault = std::exchange(e.fault, "");
        forget();
        throw Error(fault);
      }
      if (!e.wanted || e.state != State::ready) continue;
      point(e, memory_.data() + size_t(e.slot) * slot_bytes_);
      handed_.push_back(i);
    }
    if (!handed_.empty()) break;
    const auto start = std::chrono::steady_clock::now();
    done_.wait(lock);
    counts_.waited += seconds_since(start);
  }
  left_ -= int64_t(handed_.size());
  return handed_;
}

double ExpertCache::repeats() const {
  std::lock_guard lock(mutex_);
  return repeats_;
}

double ExpertCache::fill(uint64_t bytes) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  int64_t most = 0;
  for (size_t l = 0; l < layers_.size(); ++l) most = std::max(most, int64_t(layers_[l]->weights.gate.size()));
  uint64_t asked = 0;
  for (int64_t i = 0; i < most; ++i)
    for (size_t l = 0; l < layers_.size() && asked < bytes; ++l) {
      if (i >= int64_t(layers_[l]->weights.gate.size())) continue;
      Expert& e = of(int32_t(l), int32_t(i));
      if (e.state == State::absent && std::find(held_by_.begin(), held_by_.end(), -1) != held_by_.end() && give_slot(e, false)) asked += slot_bytes_;
    }
  work_.notify_all();
  done_.wait(lock, [&] {
    return demand_.empty() && std::none_of(experts_.begin(), experts_.end(), [](const Expert& e) { return e.state == State::reading; });
  });
  return seconds_since(start);
}

void ExpertCache::check_scales(const std::function<void(uint64_t, uint64_t)>& progress) const {
  struct Piece {
    const StoredTensor* tensor;
    const File* file;
  };
  std::map<uint32_t, const File*> file_of_shard;
  for (const File& f : files_) file_of_shard[f.shard] = &f;
  std::vector<Piece> pieces;
  uint64_t total = 0, largest = 0;
  for (const Expert& e : experts_)
    for (const StoredParam& p : e.stored)
      if (p.scale) {
        pieces.push_back({p.scale, file_of_shard.at(p.scale->shard)});
        total += p.scale->bytes, largest = std::max(largest, p.scale->bytes);
      }
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return std::pair(a.file, a.tensor->offset) < std::pair(b.file, b.tensor->offset); });
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> done{0};
  std::vector<std::string> faults(pieces.size());
  std::atomic<bool> stop{false};
  auto work = [&](bool tell) {
    Buffer memory(largest + 2 * kPage);  // buffers begin on a page
    for (size_t i; !stop && (i = next++) < pieces.size();) {
      const auto [t, file] = pieces[i];
      const uint64_t from = file->data + t->offset;
      try {
        const char* p = read_run(*file, from, t->bytes, memory.data() + from % kPage, {t});
        if (const void* bad = std::memchr(p, 255, t->bytes))
          fail("[experts] {} in {} holds 255 (not a number) at {}; the file is damaged, download it again", t->name, file->path,
               static_cast<const char*>(bad) - p);
      } catch (const Error& e) { faults[i] = e.what(), stop = true; }
      done += t->bytes;
      if (tell && progress) progress(done, total);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 7; ++i) threads.emplace_back(work, false);
  work(true);
  for (std::thread& t : threads) t.join();
  for (const std::string& f : faults)
    if (!f.empty()) throw Error(f);
  if (progress) progress(total, total);
}

ExpertCache::Counts ExpertCache::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

// ---- readers

void ExpertCache::read_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || !demand_.empty() || !ahead_.empty(); });
    if (stop_) return;
    std::deque<int32_t>& queue = demand_.empty() ? ahead_ : demand_;
    Expert& e = experts_[size_t(queue.front())];
    queue.pop_front();
    e.state = State::reading;
    char* slot = memory_.data() + size_t(e.slot) * slot_bytes_;
    lock.unlock();
    std::string fault;
    uint64_t bytes = 0;
    try {
      bytes = read(e, slot);
    } catch (const Error& error) { fault = error.what(); }
    lock.lock();
    counts_.bytes += bytes;
    e.state = State::ready;
    if (!fault.empty()) leave(e), e.fault = fault;
    done_.notify_all();
  }
}

// `bytes` from `from` on, to `to`, which lies as far into a page as `from` does; what shares its pages comes along. An Error names the first of
// `tensors` (in the order of the file) that is not there in full.
const char* ExpertCache::read_run(const File& f, uint64_t from, uint64_t bytes, char* to, std::initializer_list<const StoredTensor*> tensors) const {
  const uint64_t lead = direct_ ? from % kPage : 0, first = from - lead, least = lead + bytes;
  const uint64_t size = direct_ ? (least + kPage - 1) / kPage * kPage : least;
  for (uint64_t got = 0; got < least;) {
    const ssize_t n = pread(direct_ ? f.direct : f.fd, to - lead + got, size - got, off_t(first + got));
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) {
      got += uint64_t(n);
      continue;
    }
    const int problem = errno;
    const StoredTensor* at = nullptr;
    for (const StoredTensor* t : tensors)
      if (t && f.data + t->offset + t->bytes > first + got && (!at || t->offset < at->offset)) at = t;
    const std::string name = at ? at->name : "an expert";
    K3_CHECK(n == 0, "[experts] reading {} from {} failed at byte {}: {}", name, f.path, first + got, std::strerror(problem));
    struct stat now {};
    const int64_t end = fstat(f.fd, &now) == 0 ? int64_t(now.st_size) : int64_t(first + got);
    fail("[experts] {} ends at byte {}, before the end of {}; it was cut after it was opened, download it again", f.path, end, name);
  }
  return to;
}

uint64_t ExpertCache::read(const Expert& e, char* slot) const {
  uint64_t total = 0;
  for (const Run& run : e.runs) {
    const auto& [a, b, c] = e.stored;
    read_run(files_[run.file], run.from, run.bytes, slot + run.at, {a.value, a.scale, b.value, b.scale, c.value, c.scale});
    total += run.bytes;
  }
  for (int i = 0; i < 3; ++i)
    if (const StoredTensor* t = e.stored[i].scale)
      if (const void* bad = std::memchr(slot + e.scale_at[i], 255, t->bytes))
        fail("[experts] {} in {} holds 255 (not a number) at {}; the file is damaged", t->name, files_[e.runs[0].file].path,
             static_cast<const char*>(bad) - (slot + e.scale_at[i]));
  return total;
}

}  // namespace k3
