// The arithmetic of the working notes, recomputed from the shipped configs and the planner's counters.
#include "k3/lab/experiment.h"
#include "k3/plan/notes.h"

namespace k3::lab {

namespace {

std::vector<Unit> units(const Setting&) {
  return {{"notes", 1, {{"claims", 3}}, [](const Tick&) {
             json out = json::array();
             for (const plan::Claim& c : plan::notes())
               out.push_back({{"claim", c.claim}, {"recomputed", c.recomputed}, {"verdict", plan::name_of(c.verdict)}, {"why", c.why}});
             return out;
           }}};
}

Findings conclude(const Setting&, const Results& r) {
  Findings f;
  Table t{"Claims", {"claim", "verdict", "recomputed", "condition, or what is right"}, {}};
  std::map<std::string, int> count;
  for (const json& c : r.at("notes")) {
    t.rows.push_back({c["claim"], c["verdict"], c["recomputed"], c["why"]});
    ++count[c["verdict"]];
    if (c["verdict"] == plan::name_of(plan::Verdict::misprint))
      f.notes.push_back("Not so: " + c["claim"].get<std::string>() + ". Right: " + c["why"].get<std::string>() + ".");
  }
  f.answer = std::to_string(t.rows.size()) + " claims:";
  for (const auto& [verdict, n] : count) f.answer += " " + std::to_string(n) + " " + verdict + ",";
  f.answer.back() = '.';
  f.tables.push_back(t);
  return f;
}

}  // namespace

const Experiment kPlanClaims{"plan-claims", "Does the arithmetic of the working notes hold when the planner recomputes it?", units, conclude};

}  // namespace k3::lab
