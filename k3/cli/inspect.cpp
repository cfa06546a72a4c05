#include <fmt/core.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "k3/cli/commands.h"
#include "k3/cli/status_line.h"
#include "k3/core/error.h"
#include "k3/core/isa.h"
#include "k3/core/thousands.h"
#include "k3/model/checkpoint.h"
#include "k3/model/damage.h"
#include "k3/tokenizer/stop_ids.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {

namespace {

// Runs of equal layers: "kda x3, mla, ..." counted from 0.
std::string pattern(const Config& c) {
  std::string text;
  for (size_t l = 0; l < c.mixer_of_layer.size();) {
    size_t n = 1;
    while (l + n < c.mixer_of_layer.size() && c.mixer_of_layer[l + n] == c.mixer_of_layer[l]) ++n;
    text += (text.empty() ? "" : ", ") + c.mixer_of_layer[l] + (n > 1 ? fmt::format(" x{}", n) : "");
    l += n;
  }
  return text;
}

// Everything that can be known by reading all of it.
void verify(const Snapshot& snapshot) {
  const double start = seconds_now();
  StatusLine status;
  const Damage damage = find_damage(snapshot, status.of("reading", Progress::bytes));
  status.clear();
  const double seconds = seconds_now() - start;
  int faults = 0;
  for (const Damage::Finding& f : damage.findings) {
    fmt::print("{}              {}\n", f.fault ? "FAULT   " : "note    ", f.what);
    faults += f.fault;
  }
  fmt::print("read                  {} bytes in {:.1f} s ({:.2f} GB/s); {} files have the hash that is given for them\n",
             thousands(int64_t(damage.bytes)), seconds, double(damage.bytes) * 1e-9 / seconds, damage.hashes);
  K3_CHECK(damage.good(), "[inspect] {} faults in {}; download what they name again", faults, snapshot.folder());
}

// Which ids end a reply, and who says so; without a tokenizer, what the config says.
void print_stops(const std::string& path, const Config& c) {
  if (std::filesystem::exists(path + "/tiktoken.model")) {
    const Tokenizer t = Tokenizer::load(path);
    const std::vector<StopId> stops = stop_ids(path, t);
    fmt::print("tokenizer             {} tokens and {} specials\n", thousands(t.ranks()), int(Tokenizer::kSpecials));
    for (size_t i = 0; i < stops.size(); ++i)
      fmt::print("{:<22}{} {} ({})\n", i ? "" : "end of text", stops[i].id, t.label(stops[i].id), stops[i].from);
    return;
  }
  for (size_t i = 0; i < c.eos_token_id.size(); ++i) fmt::print("{:<22}{} (config.json)\n", i ? "" : "end of text", c.eos_token_id[i]);
}

void run(const std::string& named, bool tensors, bool verified) {
  std::string path = resolve_snapshot(named);
  Config c = Config::load(path);
  c.finish();
  Model model(c);
  int64_t total = 0, inactive = 0;
  for (const Param& p : model.params().all()) {
    total += p.shape.size();
    if (p.name.find(".experts.") != std::string::npos) inactive += p.shape.size();
  }
  double unused = c.num_experts ? 1.0 - double(c.num_experts_per_token) / double(c.num_experts) : 0;
  ModelState state = model.new_state(1, Device::null, false);
  fmt::print("model type            {}\n", c.model_type);
  fmt::print("layers                {}: {}\n", c.num_hidden_layers, pattern(c));
  fmt::print("hidden size           {}, vocabulary {}\n", c.hidden_size, thousands(c.vocab_size));
  fmt::print("residual              {}\n",
             c.attn_res_block_size ? fmt::format("attention over depth, blocks of {} layers", c.attn_res_block_size) : "plain");
  if (c.num_experts)
    fmt::print("experts               {} routed, {} a token{}, {} shared\n", c.num_experts, c.num_experts_per_token,
               c.routed_expert_hidden_size ? fmt::format(", in a latent space of {}", c.routed_expert_hidden_size) : "", c.num_shared_experts);
  fmt::print("positional encoding   {}\n", c.mla_use_nope ? "none" : fmt::format("rotation in mla, theta {:g}", c.rope_theta));
  fmt::print("parameters            {} ({} active a token, embedding not counted)\n", thousands(total),
             thousands(total - int64_t(double(inactive) * unused) - c.vocab_size * c.hidden_size));
  fmt::print("memory a sequence     {} bytes, whatever its length, in float32\n", thousands(state.bytes_per_slot()));
  fmt::print("memory a token        {} bytes in float32 ({} in deterministic mode)\n", thousands(state.bytes_per_token()),
             thousands(model.new_state(1, Device::null, true).bytes_per_token()));
  print_stops(path, c);
  fmt::print("instruction set       {} (best here: {})\n", cpu::name_of(cpu::isa()), cpu::name_of(cpu::best_isa()));
  namespace fs = std::filesystem;
  auto named_there = [&](const char* file) { return fs::symlink_status(path + file).type() != fs::file_type::not_found; };  // a dangling link too
  const bool weights = fs::is_directory(path) && (named_there("/model.safetensors") || named_there("/model.safetensors.index.json"));
  K3_CHECK(weights || (!tensors && !verified), "[inspect] {} holds no weights (model.safetensors or its index), which {} asks for", path,
           verified ? "--verify" : "--tensors");
  if (!weights) fmt::print("files                 no weights here: nothing was checked but the config\n");
  if (weights) {
    Snapshot snapshot(path);
    fmt::print("files                 {} tensors, {} bytes\n", thousands(int64_t(snapshot.tensors().size())), thousands(int64_t(snapshot.bytes())));
    find_parameters(model, snapshot);
    fmt::print("checked               every tensor is there, with the right shape, and none too many\n");
    if (tensors)
      for (const StoredTensor& t : snapshot.tensors()) fmt::print("  {:<80} {:<5} {}\n", t.name, name_of(t.dtype), to_string(t.shape));
    if (verified) verify(snapshot);
  }
}

}  // namespace

void add_inspect(CLI::App& app) {
  CLI::App* c = app.add_subcommand("inspect", "what a model is: layers, parameters, memory, files");
  c->footer("Example:\n  k3 inspect golden/kimi-k3-a");
  auto path = std::make_shared<std::string>();
  auto tensors = std::make_shared<bool>(false);
  c->add_option("model", *path, "snapshot folder or config.json")->required();
  c->add_flag("--tensors", *tensors, "list every tensor");
  auto verified = std::make_shared<bool>(false);
  c->add_flag("--verify", *verified, "read every byte: zeros where weights should be, values that are no numbers, hashes where the folder gives any");
  c->callback([=] { run(*path, *tensors, *verified); });
}

}  // namespace k3
