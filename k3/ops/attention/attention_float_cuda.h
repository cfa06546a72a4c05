#pragma once
// Attention in float32 on the GPU, any head widths up to 256, in the layouts of the CPU path: the structs are the CPU's, their pointers (lists of
// rows, sequences, tiles and blocks too) are on the device. Fixed order: two runs give the same bits, and a row's bits do not depend on the rows that
// share its call. Every function returns null, or a sentence that says which argument it cannot serve.
#include <cstdint>

#include "k3/ops/attention/absorbed_kernels.h"
#include "k3/ops/attention/attention_kernels.h"

namespace k3::cuda {

// `longest`: at least the largest number of queries of a sequence; it sizes the grids.
const char* attention_append(const cpu::AttentionArgs&, int64_t longest, void* stream);
const char* attention_forward(const cpu::AttentionArgs&, int64_t longest, int64_t t0, int64_t t1, void* stream);
const char* attention_max_logit(const cpu::AttentionArgs&, int64_t row_count, float* out, void* stream);  // row_count: of a.rows
const char* attention_backward(const cpu::AttentionArgs&, int64_t longest, void* stream);
// Its beginning and its end, which attention_narrow_cuda.h has too: d = rowsum(dy * y);  dshared_sum += each kv head's dshared, in order.
const char* attention_row_products(const cpu::AttentionArgs&, void* stream);
const char* attention_sum_shared(const cpu::AttentionArgs&, void* stream);

// Rows [c | k_pe] of a call's tokens into the blocks of their sequences (AttentionArgs: rows, blocks, sequences).
const char* latent_append(const cpu::AttentionArgs&, int64_t longest, const float* c, int64_t rank, const float* k_pe, int64_t rope, void* stream);
// Rows first .. first+n-1 of a sequence whose blocks these are: latents (n, rank), shared (n, rope)
const char* latent_gather(float* const* blocks, int64_t first, int64_t n, float* latents, int64_t rank, float* shared, int64_t rope, void* stream);

const char* absorbed_forward(const cpu::AbsorbedArgs&, void* stream);

}  // namespace k3::cuda
