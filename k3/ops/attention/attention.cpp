#include "k3/ops/attention/attention.h"

#include "k3/core/error.h"
#include "k3/ops/attention/expanded.h"

namespace k3 {

Var attention(Var q, Var k, Var v, const AttentionShape& s, const Batch& batch, KvCache* cache, Tensor* max_logit) {
  Context& c = q.context();
  K3_CHECK(s.kv_heads > 0 && s.heads > 0 && s.heads % s.kv_heads == 0, "[attention] {} heads can't share {} key heads evenly", s.heads, s.kv_heads);
  check_attention_call("attention", c, q.rows(), s.heads, s.key_dim, s.value_dim, batch, cache, max_logit);
  auto check = [&](const char* name, const Var& x, int64_t heads, int64_t dim) {
    K3_CHECK(x.rows() == q.rows() && x.cols() == heads * dim, "[attention] {} is ({}) but {} rows of {} heads of {} are wanted", name,
             to_string(x.value().shape()), q.rows(), heads, dim);
  };
  check("q", q, s.heads, s.key_dim);
  check("k", k, s.kv_heads, s.key_dim);
  check("v", v, s.kv_heads, s.value_dim);
  if (cache) {
    const std::string want = KvCache(0, s, Device::null).name();
    K3_CHECK(cache->name() == want, "[attention] the cache is a {}, not a {}", cache->name(), want);
  }
  Var y(c, DType::f32, {q.rows(), s.heads * s.value_dim});
  expanded_attention({"attention", {s.kv_heads, s.key_dim, 0, s.value_dim}, s.heads / s.kv_heads, s.scale, q, k, v, {}, s.key_dim, s.value_dim, 0}, y,
                     batch, cache, max_logit);
  return y;
}

}  // namespace k3
