#include "k3/ops/embedding/embedding.h"

#include <algorithm>

#include "k3/core/error.h"
#include "k3/ops/embedding/embedding_cuda.h"
#include "k3/ops/embedding/embedding_kernels.h"
#include "k3/tape/tape.h"

namespace k3 {

Var embedding(Context& c, const Tensor& ids, Param& table) {
  int64_t rows = ids.size(), vocabulary = table.value.rows(), d = table.value.cols();
  DType type = table.value.dtype();
  K3_CHECK(ids.dtype() == DType::i32, "[embedding] ids must be I32, not {}", name_of(ids.dtype()));
  K3_CHECK(table.value.rank() == 2 && (type == DType::f32 || type == DType::bf16), "[embedding] {} must be a matrix of F32 or BF16, not {} of {}",
           table.name, to_string(table.value.shape()), name_of(type));
  const bool here = ids.device() != Device::cuda;  // ids of the GPU were made there, by sampling: nobody can look at them in time
  K3_CHECK(here || (c.device == Device::cuda && !c.tape), "[embedding] ids must be in the memory of the CPU, to be checked there");
  auto check = [ids, &table, vocabulary] {
    for (int64_t n = 0; n < ids.size(); ++n)
      K3_CHECK(ids.i32()[n] >= 0 && ids.i32()[n] < vocabulary, "[embedding] the id at position {} is {}, but {} has rows 0 to {}", n, ids.i32()[n],
               table.name, vocabulary - 1);
  };
  if (c.device != Device::null && here) check();
  Var y(c, DType::f32, {rows, d});
  cpu::EmbeddingArgs a{};
  a.rows = rows, a.d = d, a.ids = ids.i32(), a.y = y.f32();
  if (c.device == Device::cuda && here)
    a.ids = c.fed<int32_t>(*c.arena, rows, [ids, check](int32_t* to) {
      check();
      std::copy_n(ids.i32(), ids.size(), to);
    });
  if (type == DType::f32)
    a.table = table.value.f32();
  else
    a.table_bf16 = reinterpret_cast<const uint16_t*>(table.value.as<bf16>());
  double n = double(rows * d);
  c.cost("embedding", {.flops = 0, .bytes = (4 + double(bytes_of(type))) * n, .held = double(bytes_of(type)) * n});
  if (c.device == Device::cpu) cpu::embedding().embedding_forward(a);
  if constexpr (gpu::kBuilt) {
    if (c.device == Device::cuda) {
      if (table.catch_up) table.catch_up(a.ids, rows);
      gpu::check(cuda::embedding_forward(a, gpu::stream()));
    }
  }
  if (table.grad.empty()) return y;
  Tensor dtable = table.grad, touched = table.touched;
  on_backward(y, [=, &c] {
    cpu::EmbeddingArgs b = a;
    b.dy = y.grad().f32(), b.dtable = dtable.f32();
    b.touched = touched.empty() ? nullptr : touched.as<uint8_t>(), b.part = kGradPart;
    c.cost("embedding", {.flops = n, .bytes = 12 * n});
    if (c.device == Device::cpu) cpu::embedding().embedding_backward(b);
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) gpu::check(cuda::embedding_backward(b, gpu::stream()));
    }
  });
  return y;
}

}  // namespace k3
