#pragma once
// Memory: how much there is, what a model needs of it, and what is left for its experts.
//
//   plan = program + resident weights + embedding rows + states + scratch + experts
//
// Resident are the weights of attention, router, shared experts, dense layers and head. The embedding is read by row, where it is mapped.
// Scratch is what the same code asks for on the null device. If the experts don't fit, as many slots as fit (ExpertCache) hold some of them.
#include <cstdint>
#include <span>
#include <string>

#include "k3/core/memory.h"
#include "k3/infer/expert_cache.h"

namespace k3 {

uint64_t parse_size(const std::string& text);  // "8GiB", "500 MB", "1.5G" (G is GiB), "123456"; Error otherwise

struct MemoryRequest {
  std::string budget = "auto";  // or a size: the most that the whole process may have resident
  int64_t sequences = 1;        // states
  int64_t marks = 0;            // places to go back to (Session::mark), each with the part of a state that has one size
  int64_t context = 0;          // tokens of each
  int64_t at_once = 256;        // tokens of one step
  bool deterministic = true;
  bool loss = false;          // of all tokens, in place of the last one's logits; no states
  bool trust_scales = false;  // experts on disk: a damaged scale may wait until its expert is read (ExpertCache::check_scales)
  LoadOptions load;
};

struct MemoryPlan {
  uint64_t budget = 0, available = 0, program = 0, resident = 0, embedding = 0, states = 0, scratch = 0;
  uint64_t expert = 0;                                        // bytes of one
  int64_t experts = 0, slots = 0, top_k = 0, moe_layers = 0;  // slots == experts: all stay where they are mapped
  double memory_rate = 0, disk_rate = 0;                      // bytes a second, measured; 0: not measured
  int64_t context = 0;                                        // tokens that there is room for, all sequences together
  bool automatic = false, deterministic = true;

  bool fits() const { return slots == experts; }
  uint64_t fixed() const { return program + resident + embedding + states + scratch; }
  uint64_t total() const { return fixed() + uint64_t(slots) * expert; }
  double seconds_a_token() const;  // an estimate: every expert as likely as any other, all bytes at the measured rates
  std::string text() const;        // a table, or one line when everything fits
};

// Before anything is loaded. `cache` (null: no routed experts) says what an expert takes. Error with the smallest budget that works.
MemoryPlan plan_memory(Model& model, const std::vector<StoredParam>& found, const ExpertCache* cache, const MemoryRequest& request);

// What the states of a request take.
uint64_t state_bytes(const Model& model, const MemoryRequest& request);
// The plan of the first request that has good room: everything fits, or the states take at most a quarter of what they share with the experts.
// If none has, the first that works at all; if none works, the last one's Error. `chosen`: its place in the list.
MemoryPlan plan_memory(Model& model, const std::vector<StoredParam>& found, const ExpertCache* cache, std::span<const MemoryRequest> wishes,
                       size_t& chosen);

// Bytes a second that all threads read together from so much memory; more than the processor caches, or it is their speed.
double memory_read_rate(uint64_t bytes);

}  // namespace k3
