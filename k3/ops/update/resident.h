#pragma once
// ResidentUpdate: gradient norm, clipping, AdamW and Muon of a step on the GPU, from lists that are made once. Nothing in it waits for the host: the
// scale that clips stays on the GPU, and where a gradient is not finite nothing changes. `done` hears of it through Context::read, while the updates
// run: Context::later is sealed ahead of them.
//
//   ResidentUpdate update(all, adamw, muon);
//   update.step(c, {.lr = lr, .step = t}, {.lr = lr}, clip, [&](const GradientNorm& g) { ... });
//
// The arithmetic is that of adamw_step and muon_step (update.h); where training multiplies in bfloat16, Newton-Schulz runs on bfloat16 matrices, as
// it is usually done: X X^T, its polynomial and X <- a X + Z X, matrices of one shape together. Param::narrow is renewed with the value. The
// shapes of Muon run side by side. Where a step touches few rows of a parameter (Param::touched), the others' updates come late (Param::catch_up).
#include <functional>
#include <memory>
#include <vector>

#include "k3/core/buffer.h"
#include "k3/core/gpu.h"
#include "k3/ops/update/update.h"

namespace k3 {

class ResidentUpdate {
 public:
  struct AdamW {
    Param* param;
    Tensor m, v;
    bool decay;
  };
  struct Muon {
    Param* param;
    Tensor momentum;
    int64_t blocks;
  };
  ResidentUpdate(std::vector<Param*> all, std::vector<AdamW> adamw, std::vector<Muon> muon);
  ~ResidentUpdate();  // no row is behind then
  ResidentUpdate(const ResidentUpdate&) = delete;
  void step(Context& c, const AdamWOptions& adamw, const MuonOptions& muon, double clip, std::function<void(const GradientNorm&)> done);
  // Before each run of a captured step(): what of its options changes.
  void set(float adamw_lr, float muon_lr, int64_t step) { adamw_lr_ = adamw_lr, muon_lr_ = muon_lr, step_ = step; }

 private:
  struct Group {                         // matrices of one shape, one behind the other
    int64_t m, n, count, at, square_at;  // where its matrices begin, and their squares
  };
  template <class T>
  const T* keep(const std::vector<T>& list);
  void orthogonalise(void* x, void* y, void* s, void* z, gpu::Branches& side) const;

  std::vector<Param*> all_;
  std::vector<AdamW> adamw_, late_;  // late_: of few touched rows
  std::vector<Muon> muon_;
  std::vector<Group> groups_;
  std::vector<Buffer> lists_;
  struct Lists;
  std::shared_ptr<Lists> at_;  // where they are
  float adamw_lr_ = 0, muon_lr_ = 0;
  int64_t step_ = 1;
};

}  // namespace k3
