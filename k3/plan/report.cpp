#include "k3/plan/report.h"

#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/plan/chart.h"

namespace k3::plan {

namespace {

const char kHead[] =
    R"(<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>k3 plan</title><style>
body{font:15px/1.5 system-ui,sans-serif;color:#1a1a19;background:#fcfcfb;max-width:920px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin:2.2rem 0 .4rem}p{margin:.3rem 0;color:#55544f}
figure{margin:1.2rem 0}figcaption{font-weight:600;margin-bottom:.3rem}svg{width:100%;height:auto}
.t{font-size:11.5px;fill:#55544f}.s{font-size:11px;fill:#55544f}.n{font-size:9.5px;fill:#fff;font-weight:600;pointer-events:none}.l{font-size:12.5px;fill:#1a1a19}.g{stroke:#e4e3dd;stroke-width:1}
table{border-collapse:collapse;width:100%;font-size:13px}td{padding:.15rem .5rem;border-top:1px solid #e4e3dd;vertical-align:top}td:nth-child(2){text-align:right;white-space:nowrap}td:nth-child(4){color:#55544f}
.k{color:#77766f;white-space:nowrap}</style><body>)";

std::string roofline(const ReportModel& m, const Hardware& h, const Question& q) {
  std::vector<Series> s;
  auto regime = [&](const std::string& name, const Work& w) {
    Series out{name, {}, false};
    for (const OperatorTime& o : step_time(m.architecture, h, m.deployment, w).operators) {
      if (o.flops <= 0 || o.bytes <= 0 || o.seconds <= 0) continue;
      out.points.push_back({o.flops / o.bytes, o.flops / o.seconds, o.name,
                            fmt::format("{}, {}: {}, {} of {}; bound by {}", name, o.name, show(o.flops / o.bytes, "FLOP/B"),
                                        show(o.flops / o.seconds, "FLOP/s"), show(o.seconds, "s"), name_of(o.bound))});
    }
    s.push_back(out);
  };
  regime(fmt::format("decode, batch {:g}", q.batch), {Regime::decode, q.batch, q.context, q.width, q.replay});
  const double large = std::max(1.0, std::floor(memory_of(m.architecture, h, m.deployment).sequences(q.context)));
  if (large > q.batch) regime(fmt::format("decode, batch {:g}", large), {Regime::decode, large, q.context, 1});
  regime(fmt::format("prefill {:.0f}", q.context), {Regime::prefill, 1, 0, q.context});
  double lowest = 1e300, highest = 0;
  for (const Series& x : s)
    for (const Point& p : x.points) lowest = std::min(lowest, p.x), highest = std::max(highest, p.x);
  const double top = h.peak("fp8");
  highest = std::max(highest, 4 * top / h.hbm);
  s.push_back(
      {"limit", {{lowest, lowest * h.hbm, "", ""}, {top / h.hbm, top, "", ""}, {highest, top, top > h.bf16 ? "fp8" : "peak", ""}}, true, true});
  if (top > h.bf16) s.push_back({"limit", {{h.bf16 / h.hbm, h.bf16, "", ""}, {highest, h.bf16, "bf16", ""}}, true, true});
  return xy_chart(fmt::format("Roofline of {} on {}: what each operator reaches (estimate)", m.architecture.name, h.name), "FLOPs a byte of HBM",
                  "FLOP/s of one rank", s, "", "FLOP/s");
}

std::string bars(const std::vector<ReportModel>& models, const Hardware& h, const Question& q) {
  std::vector<Bar> time, memory;
  for (const ReportModel& m : models) {
    for (const auto& [name, w] : {std::pair<std::string, Work>{fmt::format("decode step, batch {:g}, context {:.0f}", q.batch, q.context),
                                                               {Regime::decode, q.batch, q.context, q.width, q.replay}},
                                  {fmt::format("prefill of {:.0f}", q.context), {Regime::prefill, 1, 0, q.context}}}) {
      StepTime t = step_time(m.architecture, h, m.deployment, w);
      Bar b{models.size() > 1 ? m.architecture.name + ", " + name : name, show(t.seconds(), "s"), {}};
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
  return stacked_bars("Where a step's time goes (estimate)", time, "s") + stacked_bars("Memory of one rank", memory, "B");
}

std::string curves(const std::vector<ReportModel>& models, const Hardware& h, const Question& q) {
  std::vector<Series> tpot, rate, context, cache;
  for (const ReportModel& m : models) {
    const Memory x = memory_of(m.architecture, h, m.deployment);
    Series a{m.architecture.name, {}}, b = a, c = a, d = a;
    for (double batch = 1; batch <= 4096 && (batch == 1 || x.sequences(q.context) >= batch); batch *= 2) {
      double t = step_time(m.architecture, h, m.deployment, {Regime::decode, batch, q.context}).seconds();
      a.points.push_back({batch, t, "", ""}), b.points.push_back({batch, double(m.deployment.dp) * batch / t / double(m.deployment.gpus), "", ""});
    }
    for (double length = 1024; length <= 1048576; length *= 2) {
      double t = step_time(m.architecture, h, m.deployment, {Regime::decode, q.batch, length}).seconds();
      c.points.push_back({length, t, "", ""}), d.points.push_back({length, std::max(1e-3, x.sequences(length)), "", ""});
    }
    tpot.push_back(a), rate.push_back(b), context.push_back(c), cache.push_back(d);
  }
  return xy_chart("Time a token over the batch, as far as memory lasts (estimate)", "sequences of a group", "time of a step", tpot, "", "s") +
         xy_chart("Throughput of one GPU over the batch (estimate)", "sequences of a group", "token/s and GPU", rate, "", "") +
         xy_chart(fmt::format("Time a token over the context, batch {:g} (estimate)", q.batch), "tokens of context", "time of a step", context, "",
                  "s") +
         xy_chart("How many sequences of a length fit into a group", "tokens of context", "sequences", cache, "", "");
}

// Training: what a rank holds, where the step's FLOPs go, and how both grow.
std::string training_charts(const std::vector<ReportModel>& models, const Hardware& h) {
  std::vector<Bar> memory, flops;
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
    Bar counted{name.empty() ? "a micro-batch, forward and backward" : name, "", {}};
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
    Series a{m.architecture.name, {}}, b = a;
    for (double length = 1024; length <= 1048576; length *= 2) a.points.push_back({length, training_flops(m.architecture, length).total(), "", ""});
    for (int64_t times = 1; times <= 64; times *= 2) {
      Deployment d = m.deployment;
      d.dp *= times, d.gpus *= times;
      b.points.push_back({double(d.gpus), training_memory(m.architecture, d).total(), "", ""});
    }
    token.push_back(a), resident.push_back(b);
  }
  resident.push_back({"a GPU's memory",
                      {{resident[0].points.front().x, h.memory, "", ""}, {resident[0].points.back().x, h.memory, "all of a GPU", ""}},
                      true,
                      true});
  return stacked_bars("Memory of one rank", memory, "B") +
         (flops.empty() ? "" : stacked_bars("FLOPs by operator, counted from the code", flops, "FLOP")) +
         xy_chart("FLOPs a token over the length of a sequence", "tokens of a sequence", "FLOPs a token", token, "", "FLOP") +
         xy_chart("Weights, gradients and optimizer of a rank, the layout repeated", "GPUs", "bytes of a rank", resident, "", "B");
}

}  // namespace

std::string html_report(const std::vector<ReportModel>& models, const Hardware& h, const Question& q) {
  std::string names;
  for (const ReportModel& m : models) names += (names.empty() ? "" : " / ") + m.architecture.name;
  std::string out = std::string(kHead) + fmt::format("<h1>{} on {}</h1><p>{}", escape(names), escape(h.name),
                                                     escape(fmt::format("{} GPUs, {}", models[0].deployment.gpus, to_string(models[0].deployment))));
  out +=
      fmt::format(". Times are estimates with the constants '{}' ({}); published cases are predicted to 15 to 30 %. Bytes and FLOPs are exact.</p>",
                  escape(h.efficiency.name), escape(h.efficiency.source));
  if (q.train) {
    out += training_charts(models, h);
  } else {
    for (const ReportModel& m : models) out += roofline(m, h, q);
    out += bars(models, h, q) + curves(models, h, q);
  }
  for (const ReportModel& m : models)
    for (const Section& s : m.sections) {
      out += fmt::format("<h2>{}{}</h2><table>", models.size() > 1 ? escape(m.architecture.name) + ": " : "", escape(s.title));
      for (const Number& n : s.numbers)
        out += fmt::format("<tr><td>{}</td><td title='{}'>{}</td><td class='k'>{}</td><td>{}</td></tr>", escape(n.key),
                           escape(show(n.value, n.unit, true)), escape(show(n.value, n.unit)), name_of(n.kind), escape(n.formula));
      out += "</table>";
    }
  return out + "</body></html>\n";
}

}  // namespace k3::plan
