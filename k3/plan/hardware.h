#pragma once
// Hardware: what a machine's data sheet says, and the few efficiency constants that turn its peaks into estimates. Both are data:
// configs/hardware/NAME.json and configs/hardware/efficiency/NAME.json; `k3 plan --measure` writes one for this machine.
//
// Peaks are dense and rates are per direction. link: within a node (or NVLink domain) of link_domain processors; net: beyond it.
#include <string>
#include <vector>

namespace k3::plan {

// Constants fitted to measurements (the file names its source). tau are seconds; the others fractions of a peak.
struct Efficiency {
  std::string name, source;
  struct {
    double tau, tau_standalone, hbm, flops;
  } gemm;
  struct Experts {
    double tau, hbm_ep, hbm_tp, hbm_tp16, flops_ep, flops_tp;
    std::string math;
  };
  Experts w4, fp8, bf16;
  struct {
    double tau, hbm, token;
  } kda_decode;
  struct {
    double tau, chunk, flops;
  } kda_prefill;  // flops: FLOP/s that the kernel reaches; chunk: seconds of one 16-token link of the chain
  struct {
    double tau, hbm, flops;
  } mla_decode;
  struct {
    double tau, flops;
  } mla_prefill;
  struct {
    double small_tau, small_link, large_tau, large_link, limit;
  } all_reduce;  // limit: bytes up to which it is small
  struct {
    double decode_tau, decode_net, prefill_tau, prefill_net, prefill_link;
  } all_to_all;
  double rest = 0;  // norms, AttnRes, convolutions, gates, top-k: seconds a layer
  double host = 0;  // seconds a step
};

struct Hardware {
  std::string key, name, kind, note;
  double memory = 0, hbm = 0;         // bytes, B/s
  double bf16 = 0, fp8 = 0, fp4 = 0;  // FLOP/s; 0: not known
  double link = 0, net = 0, disk = 0;
  int64_t link_domain = 1;
  Efficiency efficiency;

  double peak(const std::string& math) const;  // "bf16", "fp8", "fp4"; the next wider one where a chip has none
  // Bytes/s between `ranks` ranks.
  double between(int64_t ranks) const { return ranks <= link_domain || net == 0 ? link : net; }
};

Hardware load_hardware(const std::string& key_or_file);
std::vector<std::string> hardware_keys();

}  // namespace k3::plan
