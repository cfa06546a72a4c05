#pragma once
// The arithmetic claims of the working notes on K3, each recomputed from the shipped configs: what holds, what holds with a condition, and
// what is a misprint. Verdicts depend on the numbers computed here, so a wrong formula would change them.
#include <string>
#include <vector>

namespace k3::plan {

enum class Verdict { holds, condition, misprint };
const char* name_of(Verdict v);

struct Claim {
  std::string claim;
  std::string recomputed;  // the numbers
  Verdict verdict;
  std::string why;  // the condition, or what is right
};
std::vector<Claim> notes();
std::string table(const std::vector<Claim>& claims);

}  // namespace k3::plan
