// Schedules to Python: algorithms, their verification, cost and lowered programs, and the
// simulation of their messages.
#include <pybind11/numpy.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "messages.hpp"
#include "plan.hpp"
#include "schedule.hpp"
#include "simulate.hpp"
#include "types.hpp"

namespace py = pybind11;

namespace collectives {
namespace {

using TransferTuple = std::tuple<int, int, int, bool, int>;

World make_world(int nranks, int root, const std::vector<int>& node) {
  World world;
  world.nranks = nranks;
  world.root = root;
  world.node = node;
  return world;
}

py::dict cost_dict(const Schedule& s) {
  const Cost c = cost(s);
  py::dict d;
  d["steps"] = c.steps;
  d["sent_max"] = c.sent_max;
  d["sent_total"] = c.sent_total;
  d["reduced_max"] = c.reduced_max;
  d["internode_sent_max"] = c.internode_sent_max;
  d["messages_max"] = c.messages_max;
  return d;
}

py::list lowered_steps(const Schedule& s, int rank, const std::string& order) {
  if (rank < 0 || rank >= s.world.nranks)
    throw py::value_error("rank must be one of 0.." + std::to_string(s.world.nranks - 1) +
                          ", not " + std::to_string(rank));
  if (order != "any" && order != "rank")
    throw py::value_error("order must be 'any' or 'rank', not '" + order + "'");
  const RankProgram program = lower(s, rank, order == "rank" ? Order::rank : Order::any);
  static const char* const kinds[] = {"send", "recv", "recv_send", "copy", "combine"};
  static const char* const spaces[] = {"none", "input", "output", "scratch"};
  py::list channels;
  for (const Program& p : program.channels) {
    py::list steps;
    for (const Step& step : p.steps) {
      py::list pieces;
      for (int i = step.first_piece; i < step.first_piece + step.npieces; ++i) {
        const Piece& piece = p.pieces[i];
        py::dict d;
        d["chunk"] = piece.chunk;
        d["src"] = spaces[static_cast<int>(piece.src.space)];
        d["dst"] = spaces[static_cast<int>(piece.dst.space)];
        d["reduce"] = piece.reduce;
        d["complete"] = piece.complete;
        pieces.append(d);
      }
      py::dict d;
      d["kind"] = kinds[static_cast<int>(step.kind)];
      d["recv_peer"] = step.recv_peer;
      d["send_peer"] = step.send_peer;
      d["round"] = step.round;
      d["pieces"] = pieces;
      steps.append(d);
    }
    channels.append(steps);
  }
  return channels;
}

// ---- simulation -------------------------------------------------------------------------------

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
std::vector<T> vector_of(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

// By message: round, src, dst, channel, chunks, chunks that are combined.
py::array_t<int> messages_of(const Schedule& s) {
  const Messages messages = group_messages(s);
  py::array_t<int> table({std::size_t{6}, messages.list.size()});
  auto at = table.mutable_unchecked<2>();
  for (std::size_t i = 0; i < messages.list.size(); ++i) {
    const Message& m = messages.list[i];
    int combined = 0;
    for (int k = m.first; k < m.first + m.count; ++k)
      combined += s.rounds[m.round][messages.transfers[k]].reduce;
    const int row[] = {m.round, m.src, m.dst, m.channel, m.count, combined};
    for (int k = 0; k < 6; ++k) at(k, i) = row[k];
  }
  return table;
}

// `messages` has the rows round, src, dst, channel, route; `amounts` the rows bytes, combined,
// weight.
py::tuple run_simulation(const Array<int>& messages, const Array<double>& amounts,
                         const py::tuple& routes, const Array<double>& capacity,
                         const Array<double>& combine_s_byte, const Array<double>& late_s,
                         int segments, int lanes, int slots) {
  SimulatedWorld world;
  const auto m = messages.unchecked<2>();
  const auto a = amounts.unchecked<2>();
  if (m.shape(0) != 5 || a.shape(0) != 3 || m.shape(1) != a.shape(1))
    throw std::invalid_argument("messages have five rows, amounts three, and both as many columns");
  world.nranks = static_cast<int>(late_s.size());
  for (py::ssize_t i = 0; i < m.shape(1); ++i) {
    world.messages.push_back(
        {m(0, i), m(1, i), m(2, i), m(3, i), m(4, i), a(0, i), a(1, i), a(2, i)});
    world.nchannels = std::max(world.nchannels, m(3, i) + 1);
  }
  world.route_begin = vector_of(routes[0].cast<Array<int>>());
  world.route_links = vector_of(routes[1].cast<Array<int>>());
  world.latency = vector_of(routes[2].cast<Array<double>>());
  world.capacity = vector_of(capacity);
  world.combine_s_byte = vector_of(combine_s_byte);
  world.late_s = vector_of(late_s);
  world.segments = segments;
  world.lanes = lanes;
  world.slots = slots;
  SimulatedTimes times;
  {
    py::gil_scoped_release release;
    times = simulate(world);
  }
  return py::make_tuple(times.seconds, times.finish_s, times.steps, times.events);
}

}  // namespace

void bind_schedules(py::module_& m) {
  py::class_<Schedule>(m, "Schedule")
      .def(py::init([](const std::string& algorithm, const std::string& collective, int nranks,
                       int nchunks, const std::vector<std::vector<TransferTuple>>& rounds, int root,
                       const std::vector<int>& node) {
             Schedule s;
             s.algorithm = algorithm;
             s.collective = collective_from_name(collective);
             s.world = make_world(nranks, root, node);
             s.nchunks = nchunks;
             s.nchannels = 1;
             for (const auto& transfers : rounds) {
               Round round;
               for (const auto& [src, dst, chunk, reduce, channel] : transfers) {
                 round.push_back({src, dst, chunk, reduce, channel});
                 s.nchannels = std::max(s.nchannels, channel + 1);
               }
               s.rounds.push_back(std::move(round));
             }
             return s;
           }),
           py::arg("algorithm"), py::arg("collective"), py::arg("nranks"), py::arg("nchunks"),
           py::arg("rounds"), py::arg("root") = 0, py::arg("node") = std::vector<int>{})
      .def_readonly("algorithm", &Schedule::algorithm)
      .def_property_readonly("collective",
                             [](const Schedule& s) { return std::string{name_of(s.collective)}; })
      .def_property_readonly("nranks", [](const Schedule& s) { return s.world.nranks; })
      .def_property_readonly("root", [](const Schedule& s) { return s.world.root; })
      .def_property_readonly("node", [](const Schedule& s) { return s.world.node; })
      .def_readonly("nchunks", &Schedule::nchunks)
      .def_readonly("nchannels", &Schedule::nchannels)
      .def_property_readonly("rounds",
                             [](const Schedule& s) {
                               std::vector<std::vector<TransferTuple>> rounds;
                               for (const Round& round : s.rounds) {
                                 auto& out = rounds.emplace_back();
                                 for (const Transfer& t : round)
                                   out.emplace_back(t.src, t.dst, t.chunk, t.reduce, t.channel);
                               }
                               return rounds;
                             })
      .def("verify", [](const Schedule& s) { verify(s); })
      .def("cost", &cost_dict)
      .def("messages", &messages_of)
      .def("lowered", &lowered_steps, py::arg("rank"), py::arg("order") = "any")
      .def(
          "check_deadlock",
          [](const Schedule& s, int depth, const std::string& order) {
            check_deadlock(lower_all(s, order == "rank" ? Order::rank : Order::any), depth);
          },
          py::arg("depth") = 1, py::arg("order") = "any");
  m.def(
      "build_schedule",
      [](const std::string& name, const std::string& collective, int nranks, int root,
         const std::vector<int>& node) {
        return build_schedule(name, collective_from_name(collective),
                              make_world(nranks, root, node));
      },
      py::arg("algorithm"), py::arg("collective"), py::arg("nranks"), py::arg("root") = 0,
      py::arg("node") = std::vector<int>{});
  m.def(
      "why_unsupported",
      [](const std::string& name, const std::string& collective, int nranks, int root,
         const std::vector<int>& node) {
        return why_unsupported(name, collective_from_name(collective),
                               make_world(nranks, root, node));
      },
      py::arg("algorithm"), py::arg("collective"), py::arg("nranks"), py::arg("root") = 0,
      py::arg("node") = std::vector<int>{});
  m.def("algorithms", [] {
    py::list list;
    for (const Algorithm* a : algorithms()) {
      py::dict d;
      d["name"] = a->name;
      d["summary"] = a->summary;
      d["when"] = a->when;
      d["source"] = a->source;
      list.append(d);
    }
    return list;
  });
}

void bind_simulation(py::module_& m) {
  m.def("simulate", &run_simulation, py::kw_only(), py::arg("messages"), py::arg("amounts"),
        py::arg("routes"), py::arg("capacity"), py::arg("combine_s_byte"), py::arg("late_s"),
        py::arg("segments"), py::arg("lanes"), py::arg("slots"));
}

}  // namespace collectives
