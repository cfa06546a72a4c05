#pragma once
// What the tests of this folder share: a complete K3 in miniature, some text, a folder that goes away, and a run of these.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "k3/core/file.h"
#include "k3/core/rng.h"
#include "k3/core/testing.h"
#include "k3/model/init.h"
#include "k3/model/model.h"
#include "k3/tokenizer/tokenizer.h"
#include "k3/train/options.h"
#include "k3/train/token_file.h"
#include "k3/train/trainer.h"

namespace k3::testing {

inline void put(const std::string& path, std::string_view text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
}
inline std::string get(const std::string& path) {
  std::ifstream f(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(f), {}};
}

// KDA and MLA, a dense and a MoE layer, attention over depth: each kind of part once.
inline nlohmann::json tiny_config() {
  return nlohmann::json::parse(R"({"model_type": "kimi_k3", "hidden_size": 16, "num_hidden_layers": 2, "mixers": ["kda", "mla"],
    "num_attention_heads": 2, "intermediate_size": 24, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 1, "first_k_dense_replace": 1, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 8, "routed_expert_hidden_size": 8, "latent_moe_use_norm": true, "q_lora_rank": 12, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "mla_use_output_gate": true, "rms_norm_eps": 1e-5,
    "linear_attn_config": {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": true},
    "train": {"document_separator": "%", "sequence_length": 16, "batch_tokens": 64, "micro_batch_tokens": 32, "steps": 8, "learning_rate": 0.01,
              "held_out": 0.2, "save_every": 3, "eval_every": 4, "log_every": 2}})");
}

// `count` documents of 5 to 60 letters, each ended by a line "%".
inline std::string tiny_text(int count = 40, uint64_t seed = 1) {
  std::string text;
  const Rng rng{seed, 3};
  for (int d = 0; d < count; ++d) {
    int length = 5 + int(rng.below(56, uint64_t(d)));
    for (int i = 0; i < length; ++i) text += "etaoin shrdlu"[rng.below(13, uint64_t(1000 + d * 100 + i))];
    text += "\n%\n";
  }
  return text;
}

// Data, model and trainer of the miniature.
struct SmallRun {
  TemporaryFolder folder;
  Tokenizer tokenizer = Tokenizer::bytes();
  std::unique_ptr<TokenFile> file;
  Split split;
  std::unique_ptr<Model> model;
  std::unique_ptr<Trainer> trainer;
  TrainOptions options;

  explicit SmallRun(const std::vector<std::string>& assignments = {}, const std::string& text = tiny_text(), Device device = Device::cpu,
                    bool bf16 = false) {
    put(folder / "config.json", tiny_config().dump());
    put(folder / "text", text);
    RunConfig run = load_run_config(folder / "config.json", assignments);
    options = run.train;
    write_token_file(folder / "tokens.bin", list_sources({folder / "text"}), "%", tokenizer);
    file = std::make_unique<TokenFile>(folder / "tokens.bin");
    split = split_documents(*file, options.held_out);
    run.model.vocab_size = tokenizer.vocabulary();
    run.model.finish();
    model = std::make_unique<Model>(run.model, true);
    model->bf16_products = bf16;
    model->params().allocate(Device::cpu);
    initialize(*model, 1);
    model->params().move_to(device);
    trainer = std::make_unique<Trainer>(*model, *file, split.train, tokenizer, options);
  }
};

}  // namespace k3::testing
