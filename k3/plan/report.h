#pragma once
// A plan as one HTML file with its charts inside (SVG, no scripts from elsewhere): roofline with each operator as a point in each regime,
// stacked bars of time and memory, curves over batch and context, and every number with its formula.
#include <string>
#include <vector>

#include "k3/plan/plan.h"

namespace k3::plan {

struct ReportModel {
  Architecture architecture;
  Deployment deployment;
  Sections sections;
};
std::string html_report(const std::vector<ReportModel>& models, const Hardware& h, const Question& q);

}  // namespace k3::plan
