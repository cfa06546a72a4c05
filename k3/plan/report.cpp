#include "k3/plan/report.h"

#include <algorithm>
#include <cmath>

#include "k3/chart/chart.h"
#include "k3/core/error.h"

namespace k3::plan {

namespace {

using chart::Chart;
using chart::escaped;
using chart::Series;
using chart::Share;

chart::ToText in(const std::string& unit) {
  return [unit](double v) { return show(v, unit); };
}
std::string both_logarithmic(const std::string& title, const std::string& x_label, const std::string& y_label, const std::vector<Series>& series,
                             const std::string& y_unit) {
  return chart::svg({Chart::curves, title, x_label, y_label, series, {}, true, true, in(""), in(y_unit)});
}

void add(Series& s, double x, double y) { s.x.push_back(x), s.y.push_back(y); }

std::string roofline(const ReportModel& m, const Hardware& h, const Question& q) {
  std::vector<Series> s;
  auto regime = [&](const std::string& name, const Work& w) {
    Series out{name, {}, {}, {}, {}, Series::marks};
    for (const OperatorTime& o : step_time(m.architecture, h, m.deployment, w).operators) {
      if (o.flops <= 0 || o.bytes <= 0 || o.seconds <= 0) continue;
      out.x.push_back(o.flops / o.bytes), out.y.push_back(o.flops / o.seconds), out.labels.push_back(o.name);
      out.tips.push_back(fmt::format("{}, {}: {}, {} of {}; bound by {}", name, o.name, show(o.flops / o.bytes, "FLOP/B"),
                                     show(o.flops / o.seconds, "FLOP/s"), show(o.seconds, "s"), name_of(o.bound)));
    }
    s.push_back(out);
  };
  regime(fmt::format("decode, batch {:g}", q.batch), {Regime::decode, q.batch, q.context, q.width, q.replay});
  const double large = std::max(1.0, std::floor(memory_of(m.architecture, h, m.deployment).sequences(q.context)));
  if (large > q.batch) regime(fmt::format("decode, batch {:g}", large), {Regime::decode, large, q.context, 1});
  regime(fmt::format("prefill {:.0f}", q.context), {Regime::prefill, 1, 0, q.context});
  double lowest = 1e300, highest = 0;
  for (const Series& x : s)
    for (double v : x.x) lowest = std::min(lowest, v), highest = std::max(highest, v);
  const double top = h.peak("fp8");
  highest = std::max(highest, 4 * top / h.hbm);
  auto limit = [&](std::vector<double> x, std::vector<double> y, const std::string& name) {
    std::vector<std::string> labels(x.size());
    labels.back() = name;
    s.push_back({"limit", std::move(x), std::move(y), {}, {}, Series::limit, labels});
  };
  limit({lowest, top / h.hbm, highest}, {lowest * h.hbm, top, top}, top > h.bf16 ? "fp8" : "peak");
  if (top > h.bf16) limit({h.bf16 / h.hbm, highest}, {h.bf16, h.bf16}, "bf16");
  return both_logarithmic(fmt::format("Roofline of {} on {}: what each operator reaches (estimate)", m.architecture.name, h.name),
                          "FLOPs a byte of HBM", "FLOP/s of one rank", s, "FLOP/s");
}

std::string bars(const std::vector<ReportModel>& models, const Hardware& h, const Question& q) {
  std::vector<Share> time, memory;
  for (const ReportModel& m : models) {
    for (const auto& [name, w] : {std::pair<std::string, Work>{fmt::format("decode step, batch {:g}, context {:.0f}", q.batch, q.context),
                                                               {Regime::decode, q.batch, q.context, q.width, q.replay}},
                                  {fmt::format("prefill of {:.0f}", q.context), {Regime::prefill, 1, 0, q.context}}}) {
      StepTime t = step_time(m.architecture, h, m.deployment, w);
      Share b{models.size() > 1 ? m.architecture.name + ", " + name : name, show(t.seconds(), "s"), {}};
      for (const OperatorTime& o : t.operators) b.parts.emplace_back(o.name, o.seconds);
      time.push_back(b);
    }
    Memory x = memory_of(m.architecture, h, m.deployment);
    double cache = q.batch * q.context * x.cache_per_token, state = q.batch * x.state_per_sequence;
    double free = h.memory - x.weights() - cache - state - m.deployment.workspace;
    memory.push_back({models.size() > 1 ? m.architecture.name : "one rank",
                      free < 0 ? fmt::format("{} of {}: does not fit", show(h.memory - free, "B"), show(h.memory, "B")) : show(h.memory, "B"),
                      {{"experts", x.routed},
                       {"trunk", x.trunk + x.small},
                       {"embedding, head", x.tables},
                       {"token cache", cache},
                       {"states", state},
                       {"workspace", m.deployment.workspace},
                       {"free", std::max(0.0, free)}}});
  }
  return chart::shares("Where a step's time goes (estimate)", time, in("s")) + chart::shares("Memory of one rank", memory, in("B"));
}

std::string curves(const std::vector<ReportModel>& models, const Hardware& h, const Question& q) {
  std::vector<Series> tpot, rate, context, cache;
  for (const ReportModel& m : models) {
    const Memory x = memory_of(m.architecture, h, m.deployment);
    Series a{m.architecture.name, {}, {}}, b = a, c = a, d = a;
    for (double batch = 1; batch <= 4096 && (batch == 1 || x.sequences(q.context) >= batch); batch *= 2) {
      double t = step_time(m.architecture, h, m.deployment, {Regime::decode, batch, q.context}).seconds();
      add(a, batch, t), add(b, batch, double(m.deployment.dp) * batch / t / double(m.deployment.gpus));
    }
    for (double length = 1024; length <= 1048576; length *= 2) {
      double t = step_time(m.architecture, h, m.deployment, {Regime::decode, q.batch, length}).seconds();
      add(c, length, t), add(d, length, std::max(1e-3, x.sequences(length)));
    }
    tpot.push_back(a), rate.push_back(b), context.push_back(c), cache.push_back(d);
  }
  return both_logarithmic("Time a token over the batch, as far as memory lasts (estimate)", "sequences of a group", "time of a step", tpot, "s") +
         both_logarithmic("Throughput of one GPU over the batch (estimate)", "sequences of a group", "token/s and GPU", rate, "") +
         both_logarithmic(fmt::format("Time a token over the context, batch {:g} (estimate)", q.batch), "tokens of context", "time of a step",
                          context, "s") +
         both_logarithmic("How many sequences of a length fit into a group", "tokens of context", "sequences", cache, "");
}

// Training: what a rank holds, where the step's FLOPs go, and how both grow.
std::string training_charts(const std::vector<ReportModel>& models, const Hardware& h) {
  std::vector<Share> memory, flops;
  std::vector<Series> token, resident;
  for (const ReportModel& m : models) {
    const TrainingMemory x = training_memory(m.architecture, m.deployment);
    const std::string name = models.size() > 1 ? m.architecture.name : "";
    memory.push_back({name.empty() ? "one rank" : name,
                      show(h.memory, "B"),
                      {{"weights", x.weights},
                       {"gradients", x.gradients},
                       {"optimizer", x.optimizer},
                       {"free, for activations", std::max(0.0, h.memory - x.total())}}});
    Share counted{name.empty() ? "a micro-batch, forward and backward" : name, "", {}};
    double sum = 0;
    for (const Section& s : m.sections)
      for (const Number& n : s.numbers) {
        const std::string start = "counted.train.", op = n.key.size() > start.size() && n.key.starts_with(start) ? n.key.substr(start.size()) : "";
        if (op.empty() || n.unit != "FLOP" || op == "total" || op == "optimizer" || op == "recompute_flops" || op.starts_with("closed_form."))
          continue;
        counted.parts.emplace_back(op, n.value), sum += n.value;
      }
    counted.total = show(sum, "FLOP");
    if (sum > 0) flops.push_back(counted);
    Series a{m.architecture.name, {}, {}}, b = a;
    for (double length = 1024; length <= 1048576; length *= 2) add(a, length, training_flops(m.architecture, length).total());
    for (int64_t times = 1; times <= 64; times *= 2) {
      Deployment d = m.deployment;
      d.dp *= times, d.gpus *= times;
      add(b, double(d.gpus), training_memory(m.architecture, d).total());
    }
    token.push_back(a), resident.push_back(b);
  }
  resident.push_back(
      {"a GPU's memory", {resident[0].x.front(), resident[0].x.back()}, {h.memory, h.memory}, {}, {}, Series::limit, {"", "all of a GPU"}});
  return chart::shares("Memory of one rank", memory, in("B")) +
         (flops.empty() ? "" : chart::shares("FLOPs by operator, counted from the code", flops, in("FLOP"))) +
         both_logarithmic("FLOPs a token over the length of a sequence", "tokens of a sequence", "FLOPs a token", token, "FLOP") +
         both_logarithmic("Weights, gradients and optimizer of a rank, the layout repeated", "GPUs", "bytes of a rank", resident, "B");
}

}  // namespace

std::string html_report(const std::vector<ReportModel>& models, const Hardware& h, const Question& q) {
  std::string names;
  for (const ReportModel& m : models) names += (names.empty() ? "" : " / ") + m.architecture.name;
  std::string out =
      chart::page_head(fmt::format("{} on {}", names, h.name)) +
      fmt::format("<p class='soft'>{}", escaped(fmt::format("{} GPUs, {}", models[0].deployment.gpus, to_string(models[0].deployment))));
  out +=
      fmt::format(". Times are estimates with the constants '{}' ({}); published cases are predicted to 15 to 30 %. Bytes and FLOPs are exact.</p>",
                  escaped(h.efficiency.name), escaped(h.efficiency.source));
  if (q.train) {
    out += training_charts(models, h);
  } else {
    for (const ReportModel& m : models) out += roofline(m, h, q);
    out += bars(models, h, q) + curves(models, h, q);
  }
  for (const ReportModel& m : models)
    for (const Section& s : m.sections) {
      out += fmt::format("<h2>{}{}</h2><table class='numbers'>", models.size() > 1 ? escaped(m.architecture.name) + ": " : "", escaped(s.title));
      for (const Number& n : s.numbers)
        out += fmt::format("<tr><td>{}</td><td title='{}'>{}</td><td>{}</td><td>{}</td></tr>", escaped(n.key), escaped(show(n.value, n.unit, true)),
                           escaped(show(n.value, n.unit)), name_of(n.kind), escaped(n.formula));
      out += "</table>";
    }
  return out + "</html>\n";
}

}  // namespace k3::plan
