#pragma once
// Lines of `k3 bench ops`: an operator at one shape, how long it took, and what it cannot take less than on this machine.
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

struct OpLine {
  std::string op, shape;
  double us = 0;  // median
  double bytes = 0, flops = 0;
  bool tensor_units = false;  // whose rate its FLOPs are held against; else float32's
  std::string note = {};
};

struct MachineRates {  // measured, a second
  double bytes = 0, flops = 0, tensor_flops = 0;
  double floor_us(const OpLine& line) const;
  const char* bound(const OpLine& line) const;  // what the floor is made of
  bool in_cache(const OpLine& line) const;      // its bytes came faster than main memory gives them: then the floor is none
};

struct OpTable {
  std::string only;  // this operator alone; empty: all
  MachineRates rates = {};
  std::vector<OpLine> lines = {};
  bool wants(std::string_view op) const;
  void add(const OpLine& line);  // and prints it
};

std::string gpu_name();
MachineRates gpu_rates();
double gpu_seconds(const std::function<void()>& enqueue);  // between two events around it
void gpu_kernel_lines(OpTable& table);                     // the kernels at K3's own shapes, in replayed graphs

}  // namespace k3
