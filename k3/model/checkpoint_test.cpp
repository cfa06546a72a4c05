#include "k3/model/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "k3/model/loading.h"
#include "k3/model/testing.h"
#include "k3/ops/linear/quantize.h"
#include "k3/ops/linear/weight_product.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using testing::throws_error;

using testing::TemporaryFolder;

std::unique_ptr<Model> made(Config c) {
  c.finish();
  auto m = std::make_unique<Model>(c);
  testing::fill(*m);
  return m;
}

std::vector<float> hidden(Model& m) {
  testing::Step step(false);
  auto ids = testing::some_ids(12, m.config().vocab_size);
  Tensor t = m.forward(step.context, testing::tensor_of(ids), Batch::one(12)).value();
  return {t.f32(), t.f32() + t.size()};
}

std::vector<float> hidden_of(const std::string& folder, bool for_training = false) {
  Config c = Config::load(folder);
  c.finish();
  Model m(c);
  Snapshot s(folder);
  load(m, s, {for_training});
  return hidden(m);
}

TEST(checkpoint, saved_and_loaded_is_the_same_model) {
  for (const Config& c : {testing::tiny_k3(), testing::tiny_linear()}) {
    TemporaryFolder f{TemporaryFolder::absent};
    auto m = made(c);
    save(*m, f.str(), 20000);  // many shards
    EXPECT_TRUE(fs::exists(f.path / "model.safetensors.index.json"));
    EXPECT_EQ(hidden_of(f.str()), hidden(*m));
    EXPECT_EQ(hidden_of(f.str(), true), hidden(*m));
  }
}

TEST(checkpoint, names_and_shapes_are_the_published_ones) {
  TemporaryFolder f{TemporaryFolder::absent};
  auto m = made(testing::tiny_k3());
  save(*m, f.str());
  Snapshot s(f.str());
  auto shape = [&](const std::string& name) {
    const StoredTensor* t = s.find("language_model.model." + name);
    return t ? to_string(t->shape) : "absent";
  };
  EXPECT_EQ(shape("layers.0.self_attn.A_log"), "16");  // padded to the head width, as the releases have it
  EXPECT_EQ(shape("layers.0.self_attn.q_conv1d.weight"), "48 x 1 x 4");
  EXPECT_EQ(shape("layers.0.mlp.gate_proj.weight"), "56 x 48");
  EXPECT_EQ(shape("layers.0.self_attention_res_proj.weight"), "1 x 48");
  EXPECT_EQ(shape("layers.3.self_attn.kv_a_proj_with_mqa.weight"), "32 x 48");
  EXPECT_EQ(shape("layers.3.self_attn.g_proj.weight"), "48 x 48");
  EXPECT_EQ(shape("layers.1.block_sparse_moe.gate.e_score_correction_bias"), "16");
  EXPECT_EQ(shape("layers.1.block_sparse_moe.experts.15.w2.weight"), "32 x 24");
  EXPECT_EQ(shape("layers.1.block_sparse_moe.shared_experts.down_proj.weight"), "48 x 48");
  EXPECT_EQ(shape("layers.1.block_sparse_moe.routed_expert_norm.weight"), "32");
  EXPECT_EQ(shape("output_attn_res_norm.weight"), "48");
  EXPECT_NE(s.find("language_model.lm_head.weight"), nullptr);
  Config c = Config::load(f.str());
  EXPECT_EQ(c.full_attn_layers, (std::vector<int64_t>{4, 8, 9}));
}

TEST(checkpoint, other_spellings_are_accepted) {
  TemporaryFolder f{TemporaryFolder::absent};
  auto m = made(testing::tiny_k3());
  save(*m, f.str());
  Snapshot s(f.str());
  std::vector<NamedTensor> tensors;
  for (const StoredTensor& t : s.tensors()) {
    std::string name = t.name;
    auto swap = [&](const std::string& from, const std::string& to) {
      if (size_t at = name.find(from); at != std::string::npos) name.replace(at, from.size(), to);
    };
    swap(".mlp.", ".block_sparse_moe."), swap("attention_res_norm.weight", "attention_res.norm_weight"),
        swap("mlp_res_proj.weight", "mlp_res.proj_weight");
    swap("output_attn_res_proj.weight", "output_attn_res.proj_weight");
    tensors.push_back({name, s.view(t)});
  }
  TemporaryFolder g{TemporaryFolder::absent};
  write_snapshot(g.str(), tensors);
  fs::copy(f.path / "config.json", g.path / "config.json");
  EXPECT_EQ(hidden_of(g.str()), hidden(*m));
}

// Writes the model's tensors after `change` saw them.
template <class F>
void rewrite(const std::string& folder, F change) {
  Snapshot s(folder);
  std::vector<NamedTensor> tensors;
  std::vector<std::vector<char>> keep;
  keep.reserve(s.tensors().size() + 4);
  for (const StoredTensor& t : s.tensors()) {
    Tensor v = s.view(t);
    auto& bytes = keep.emplace_back(static_cast<char*>(v.data()), static_cast<char*>(v.data()) + v.bytes());
    tensors.push_back({t.name, Tensor(bytes.data(), v.dtype(), v.shape())});
  }
  change(tensors);
  write_snapshot(folder, tensors);
}

TEST(checkpoint, missing_extra_and_wrong_tensors_are_named) {
  auto m = made(testing::tiny_k3());
  const std::string name = "language_model.model.layers.3.self_attn.o_proj.weight";
  auto with = [&](auto change) {
    TemporaryFolder f{TemporaryFolder::absent};
    save(*m, f.str());
    rewrite(f.str(), change);
    return hidden_of(f.str());
  };
  EXPECT_THAT([&] { with([&](auto& t) { std::erase_if(t, [&](auto& x) { return x.name == name; }); }); },
              throws_error("lacks 1 tensors that its config asks for: " + name));
  EXPECT_THAT([&] { with([&](auto& t) {
                      t.push_back({"language_model.model.surprise", t[0].value});
                    }); },
              throws_error("holds 1 tensors that its config has no place for: language_model.model.surprise"));
  EXPECT_THAT(
      [&] {
        with([&](auto& t) {
          for (auto& x : t)
            if (x.name == name) x.value = x.value.reshape({24, 96});
        });
      },
      throws_error("is 24 x 96 but this config needs 48 x 48"));
}

TEST(checkpoint, the_layer_of_multi_token_prediction_is_kept_or_dropped_and_passed_over) {
  Config c = testing::tiny_k3();
  c.num_nextn_predict_layers = 1;
  c.finish();
  Model m(c, true);
  testing::fill(m);
  for (bool keep : {true, false}) {
    TemporaryFolder f{TemporaryFolder::absent};
    save(m, f.str(), uint64_t(1) << 30, keep);
    EXPECT_EQ(hidden_of(f.str()), hidden(m));
    Snapshot snapshot(f.str());
    Config saved = Config::load(f.str());
    saved.finish();
    EXPECT_EQ(saved.num_nextn_predict_layers, keep);
    EXPECT_EQ(snapshot.find("language_model.model.layers.9.eh_proj.weight") != nullptr, keep);
    Model again(saved, true);
    load(again, snapshot, {.for_training = true});
    EXPECT_EQ(again.has_mtp(), keep);
    EXPECT_EQ(hidden(again), hidden(m));
  }
}

TEST(checkpoint, a_decay_vector_longer_than_the_heads_must_end_in_zeros) {
  auto m = made(testing::tiny_k3());
  auto with = [&](std::vector<float> values) {
    TemporaryFolder f{TemporaryFolder::absent};
    save(*m, f.str());
    rewrite(f.str(), [&](auto& t) {
      for (auto& x : t)
        if (x.name.ends_with("layers.0.self_attn.A_log")) x.value = Tensor(values.data(), DType::f32, {int64_t(values.size())});
    });
    return hidden_of(f.str());
  };
  EXPECT_EQ(with({0, 0, 0}), hidden(*m));
  EXPECT_EQ(with({0, 0, 0, 0, 0, 0, 0, 0}), hidden(*m));
  EXPECT_THAT([&] { with({0, 0, 0, 0, 0, 1, 0, 0}); }, throws_error("has 8 values for 3 heads; the rest must be zero but value 5 is 1"));
  EXPECT_THAT([&] { with({0, 0}); }, throws_error("is 2 but this config needs 3"));
}

// Sums of codes have an order of their own and round their inputs (product.h); layers multiply that by ten or so.
void expect_near(const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
  double moved = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) moved += std::pow(double(got[i]) - want[i], 2), norm += std::pow(double(want[i]), 2);
  EXPECT_LT(std::sqrt(moved / norm), tolerance);
}

// Experts in the published packed form.
void pack_experts(const std::string& folder, std::vector<std::vector<uint8_t>>& keep) {
  rewrite(folder, [&](std::vector<NamedTensor>& all) {
    std::vector<NamedTensor> packed;
    for (NamedTensor& t : all) {
      if (t.name.find(".experts.") == std::string::npos) {
        packed.push_back(t);
        continue;
      }
      const int64_t out = t.value.rows(), in = t.value.cols();
      uint8_t* codes = keep.emplace_back(size_t(out * in / 2)).data();
      uint8_t* scales = keep.emplace_back(size_t(out * in / 32)).data();
      quantize(Stored::mxfp4, t.value.f32(), out, in, codes, scales, t.name);
      packed.push_back({t.name + "_packed", Tensor(codes, DType::u8, {out, in / 2})});
      packed.push_back({t.name + "_scale", Tensor(scales, DType::u8, {out, in / 32})});
    }
    all = packed;
  });
}

TEST(checkpoint, packed_experts_stay_in_the_file_and_equal_their_widened_copies) {
  Config c = testing::tiny_k3();
  c.moe_intermediate_size = 64;
  TemporaryFolder f{TemporaryFolder::absent};
  save(*made(c), f.str());
  std::vector<std::vector<uint8_t>> keep;
  keep.reserve(1000);
  pack_experts(f.str(), keep);
  c.finish();
  Model m(c);
  Snapshot s(f.str());
  load(m, s, {});
  const Param& w1 = *m.params().find("model.layers.1.block_sparse_moe.experts.3.w1.weight");
  EXPECT_EQ(w1.value.data(), s.view(*s.find("language_model." + w1.name + "_packed")).data());
  expect_near(hidden(m), hidden_of(f.str(), true), 2e-5);

  rewrite(f.str(), [&](std::vector<NamedTensor>& all) {
    for (NamedTensor& t : all)
      if (t.name.ends_with("w2.weight_scale")) static_cast<uint8_t*>(t.value.data())[7] = 255;
  });
  EXPECT_THAT([&] { hidden_of(f.str()); }, throws_error("w2.weight_scale holds 255 (not a number) at 7"));
  EXPECT_THAT([&] { hidden_of(f.str(), true); }, throws_error("w2.weight_scale holds 255 (not a number) at 7"));
}

TEST(checkpoint, dense_matrices_are_made_narrow_and_nothing_else) {
  Config c = testing::tiny_k3();
  c.hidden_size = 64;  // q_lora_rank 20 and kv_lora_rank 24 remain: MXFP4 leaves such rows alone
  TemporaryFolder f{TemporaryFolder::absent};
  save(*made(c), f.str());
  c.finish();
  Snapshot s(f.str());
  const std::set<std::string> narrowed = {"q_proj",
                                          "k_proj",
                                          "v_proj",
                                          "g_proj",
                                          "o_proj",
                                          "q_a_proj",
                                          "q_b_proj",
                                          "kv_a_proj_with_mqa",
                                          "gate_proj",
                                          "up_proj",
                                          "down_proj",
                                          "routed_expert_down_proj",
                                          "routed_expert_up_proj"};
  for (Dense dense : {Dense::bf16, Dense::q8, Dense::mxfp4}) {
    Model m(c);
    load(m, s, {.dense = dense});
    const std::vector<StoredParam> found = find_parameters(m, s);
    size_t next = 0;
    for (const Param& p : m.params().all()) {
      const StoredParam& at = found[next++];
      const LoadedForm form = loaded_form(p, at, {.dense = dense});
      EXPECT_TRUE(form.value.dtype() == p.value.dtype() && form.value.shape() == p.value.shape()) << p.name;
      EXPECT_TRUE(form.scale.dtype() == p.scale.dtype() && form.scale.shape() == p.scale.shape()) << p.name;
      EXPECT_EQ(form.mapped, p.value.data() == s.view(*at.value).data()) << p.name;
    }
    std::vector<float> got = hidden(m);
    for (Param& p : m.params().all()) {
      std::string base = p.name.substr(0, p.name.rfind('.'));
      base = base.substr(base.rfind('.') + 1);
      bool want = narrowed.count(base) && p.name.find(".experts.") == std::string::npos && (dense != Dense::mxfp4 || p.shape[1] % 32 == 0);
      EXPECT_EQ(p.value.dtype() != DType::f32, want) << p.name;
      if (p.value.dtype() == DType::f32) continue;
      std::vector<float> wide(size_t(p.shape.size()));
      widen(weight_of(p), 0, p.shape[0], wide.data());
      p.value = m.params().own(DType::f32, p.shape), p.scale = {};
      std::memcpy(p.value.data(), wide.data(), p.value.bytes());
    }
    if (dense == Dense::bf16)
      EXPECT_EQ(got, hidden(m));
    else
      expect_near(got, hidden(m), dense == Dense::q8 ? 1e-3 : 2e-5);
    EXPECT_NE(got, hidden_of(f.str()));
    Model training(c);
    EXPECT_THAT([&] { load(training, s, {.for_training = true, .dense = dense}); }, throws_error("training takes weights as they are stored"));
  }
}

TEST(checkpoint, codes_and_scales_are_not_saved_as_weights) {
  TemporaryFolder f{TemporaryFolder::absent}, g{TemporaryFolder::absent};
  save(*made(testing::tiny_k3()), f.str());
  Config c = Config::load(f.str());
  c.finish();
  Model m(c);
  Snapshot s(f.str());
  load(m, s, {.dense = Dense::q8});
  EXPECT_THAT([&] { save(m, g.str()); }, throws_error("q_proj.weight is in codes and scales, which can't be saved"));
}

TEST(checkpoint, a_damaged_file_is_refused_before_it_is_used) {
  auto m = made(testing::tiny_linear());
  TemporaryFolder f{TemporaryFolder::absent};
  save(*m, f.str());
  const fs::path file = f.path / "model.safetensors";
  const std::string good = read_file(file);
  auto with = [&](const std::string& bytes) {
    std::ofstream(file, std::ios::binary) << bytes;
    Snapshot s(f.str());
  };
  EXPECT_THAT([&] { with(good.substr(0, good.size() - 1)); }, throws_error("it is cut, download it again"));
  EXPECT_THAT([&] { with(good.substr(0, good.size() / 2)); }, throws_error("it is cut, download it again"));
  EXPECT_THAT([&] { with(good.substr(0, 100)); }, throws_error("must have a header of"));
  EXPECT_THAT([&] { with(""); }, throws_error("cut or empty"));
  EXPECT_THAT([&] { with(good + "x"); }, throws_error("something was appended"));
  std::string text = good;
  text[8] = '!';
  EXPECT_THAT([&] { with(text); }, throws_error("not valid JSON"));
  with(good);
}

TEST(checkpoint, shards_and_index_must_agree) {
  auto m = made(testing::tiny_k3());
  auto with = [&](auto change) {
    TemporaryFolder f{TemporaryFolder::absent};
    save(*m, f.str(), 60000);
    std::vector<fs::path> shards;
    for (auto& entry : fs::directory_iterator(f.path))
      if (entry.path().extension() == ".safetensors") shards.push_back(entry.path());
    std::sort(shards.begin(), shards.end());
    change(shards);
    Snapshot s(f.str());
  };
  auto edit = [](const fs::path& shard, auto f) {
    fs::path index = shard.parent_path() / "model.safetensors.index.json";
    nlohmann::json j = nlohmann::json::parse(read_file(index));
    f(j["weight_map"]);
    write_file(index, j.dump());
  };
  EXPECT_NO_THROW(with([](auto&) {}));
  EXPECT_THAT([&] { with([](auto& s) { fs::remove(s[1]); }); }, throws_error("but that file is not there"));
  EXPECT_THAT([&] { with([](auto& s) { fs::copy(s[0], s[0].parent_path() / "model-00099-of-000006.safetensors"); }); },
              throws_error("is in the folder but not in"));
  EXPECT_THAT([&] { with([&](auto& s) { edit(s[0], [&](auto& map) { map["nothing.weight"] = s[0].filename().string(); }); }); },
              throws_error("promises tensor nothing.weight"));
  EXPECT_THAT([&] { with([&](auto& s) { edit(s[0], [](auto& map) { map.erase("language_model.lm_head.weight"); }); }); },
              throws_error("tensors but"));
}

}  // namespace
}  // namespace k3
