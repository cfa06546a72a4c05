#include "k3/lab/experiment.h"

#include "k3/core/error.h"
#include "k3/core/nearest.h"

namespace k3::lab {

const std::vector<Experiment>& experiments() {
  static const std::vector<Experiment> all = {kRecall, kBalance, kOutliers, kNormSite, kLatent, kAttnRes, kMuon, kKv, kNope, kIdentity, kPlanClaims};
  return all;
}

const Experiment& find(const std::string& name) {
  std::vector<std::string> names;
  for (const Experiment& e : experiments()) {
    if (name == e.name) return e;
    names.push_back(e.name);
  }
  fail("[lab] there is no experiment '{}'; the nearest is '{}' (see k3 lab list)", name, nearest(name, names));
}

}  // namespace k3::lab
