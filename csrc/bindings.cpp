// The Python module collectives._core. Thin: names and pointers in, names and numbers out; what
// arrays and errors mean to Python lives in the package. The calls themselves are plain CPython
// functions (not pybind11's), since a 4-byte all_reduce takes less time than pybind11 needs to look
// at its arguments.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <type_traits>

#include "adam.hpp"
#include "bench.hpp"
#include "communicator.hpp"
#include "device.hpp"
#include "errors.hpp"
#include "messages.hpp"
#include "mpi.hpp"
#include "plan.hpp"
#include "python_calls.hpp"
#include "reduce.hpp"
#include "schedule.hpp"
#include "side_stream.hpp"
#include "simulate.hpp"
#include "staging.hpp"
#include "transport_mpi.hpp"
#include "types.hpp"

#ifndef COLLECTIVES_COMMIT
#define COLLECTIVES_COMMIT "unknown"
#endif

namespace py = pybind11;
using namespace collectives;

namespace {

// ---- calls ------------------------------------------------------------------------------------

using CommunicatorPtr = std::shared_ptr<Communicator>;

py::tuple make_caller(const CommunicatorPtr& comm,
                      const std::vector<std::pair<std::uint64_t, int>>& all_reduce_choice) {
  const auto wrap = [](std::shared_ptr<Work> work) {
    return py::cast(std::move(work)).release().ptr();
  };
  py::list functions;
  for (PyObject* f : make_call_functions(comm, all_reduce_choice, wrap))
    functions.append(py::reinterpret_steal<py::object>(f));
  return py::tuple(functions);
}

// ---- schedules --------------------------------------------------------------------------------

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

// ---- timing -----------------------------------------------------------------------------------

std::vector<std::pair<std::uint64_t, std::uint64_t>> pairs_of(const std::vector<Stamp>& stamps) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> v;
  v.reserve(stamps.size());
  for (const Stamp& s : stamps) v.emplace_back(s.begin_ns, s.end_ns);
  return v;
}

void meet(Communicator& comm) {
  Call barrier;
  barrier.collective = Collective::barrier;
  Communicator::Options options;
  options.algorithm = Communicator::kDefault;
  comm.run(barrier, options);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of collectives; use the package, not this module.";
  m.attr("commit") = COLLECTIVES_COMMIT;

  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const PythonError&) {
      set_error_from_exception();
    } catch (const Error&) {
      set_error_from_exception();
    } catch (const ScheduleError&) {
      set_error_from_exception();
    }
  });
  install_wait_hooks();

  // Names, in the order of the enumerations: the index is the number that calls take.
  py::list dtypes, ops, names;
  py::dict itemsizes;
  for (int i = 0; i < kDtypeCount; ++i) {
    dtypes.append(std::string{name_of(static_cast<Dtype>(i))});
    itemsizes[py::str(std::string{name_of(static_cast<Dtype>(i))})] =
        size_of(static_cast<Dtype>(i));
  }
  for (int i = 0; i < kOpCount; ++i) ops.append(std::string{name_of(static_cast<Op>(i))});
  for (int i = 0; i < kCollectiveCount; ++i)
    names.append(std::string{name_of(static_cast<Collective>(i))});
  m.attr("dtypes") = py::tuple(dtypes);
  m.attr("ops") = py::tuple(ops);
  m.attr("collectives") = py::tuple(names);
  m.attr("itemsizes") = itemsizes;
  m.def("why_op_unsupported", [](const std::string& op, const std::string& dtype) {
    return why_unsupported(op_from_name(op), dtype_from_name(dtype));
  });
  m.def("simd_level", [] { return std::string{simd_level()}; });

  // Schedules.
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
            std::vector<RankProgram> ranks;
            for (int r = 0; r < s.world.nranks; ++r)
              ranks.push_back(lower(s, r, order == "rank" ? Order::rank : Order::any));
            check_deadlock(ranks, depth);
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

  m.def("simulate", &run_simulation, py::kw_only(), py::arg("messages"), py::arg("amounts"),
        py::arg("routes"), py::arg("capacity"), py::arg("combine_s_byte"), py::arg("late_s"),
        py::arg("segments"), py::arg("lanes"), py::arg("slots"));

  // Memory and links.
  py::class_<Region, std::shared_ptr<Region>>(m, "Region")
      .def("handle", &Region::handle)
      .def("close_handle", &Region::close_handle)
      .def_property_readonly("bytes", &Region::bytes);
  const auto shape_of = [](int nranks, std::size_t fifo_slot, int fifo_depth,
                           std::size_t stage_slot, int stage_depth) {
    RegionShape shape;
    shape.nranks = nranks;
    shape.channels = Communicator::kChannels;
    shape.fifo_slot = fifo_slot;
    shape.fifo_depth = fifo_depth;
    shape.stage_slot = stage_slot;
    shape.stage_depth = stage_depth;
    return shape;
  };
  // 8 bytes that other processes try to read, to find out whether they may: (address, value).
  m.def("pull_probe", [] {
    static const std::uint64_t value = random_cookie();
    return std::make_pair(reinterpret_cast<std::uintptr_t>(&value), value);
  });
  m.def("can_read_process", &can_read_process);
  m.def(
      "make_region",
      [shape_of](bool shared, int nranks, std::size_t fifo_slot, int fifo_depth,
                 std::size_t stage_slot, int stage_depth) {
        const RegionShape shape = shape_of(nranks, fifo_slot, fifo_depth, stage_slot, stage_depth);
        return shared ? Region::make_shared(shape) : Region::make_private(shape);
      },
      py::arg("shared"), py::arg("nranks"), py::kw_only(), py::arg("fifo_slot"),
      py::arg("fifo_depth"), py::arg("stage_slot"), py::arg("stage_depth"));
  m.def(
      "open_region",
      [shape_of](const std::string& handle, int nranks, std::size_t fifo_slot, int fifo_depth,
                 std::size_t stage_slot, int stage_depth) {
        return Region::open(shape_of(nranks, fifo_slot, fifo_depth, stage_slot, stage_depth),
                            handle);
      },
      py::arg("handle"), py::arg("nranks"), py::kw_only(), py::arg("fifo_slot"),
      py::arg("fifo_depth"), py::arg("stage_slot"), py::arg("stage_depth"));

  py::class_<MpiTransport, std::shared_ptr<MpiTransport>>(m, "MpiTransport")
      .def(py::init([](std::uintptr_t comm, std::size_t slot_bytes, int depth, double timeout) {
             MpiTransportOptions options;
             options.slot_bytes = slot_bytes;
             options.depth = depth;
             options.timeout_s = timeout;
             WithoutGil release;
             return std::make_shared<MpiTransport>(mpi_from_loaded_library(), comm, options);
           }),
           py::arg("comm"), py::kw_only(), py::arg("slot_bytes"), py::arg("depth"),
           py::arg("timeout"))
      .def_property_readonly("threads",
                             [](MpiTransport& t) { return std::string{name_of(t.threads())}; })
      .def_property_readonly("any_thread", &MpiTransport::any_thread)
      .def_property_readonly("version", [](MpiTransport& t) { return t.mpi().version(); })
      .def_property_readonly("abi",
                             [](MpiTransport& t) { return std::string{name_of(t.mpi().abi())}; });
  m.def(
      "adam",
      [](bool wide, std::uintptr_t w, std::uintptr_t g, std::uintptr_t first, std::uintptr_t second,
         std::size_t count, const std::array<double, 7>& s) {
        const AdamStep step{s[0], s[1], s[2], s[3], s[4], s[5], s[6]};
        const auto run = [&](auto* kind) {
          using T = std::remove_pointer_t<decltype(kind)>;
          adam(reinterpret_cast<T*>(w), reinterpret_cast<const T*>(g), reinterpret_cast<T*>(first),
               reinterpret_cast<T*>(second), count, step);
        };
        py::gil_scoped_release release;
        if (wide) {
          run(static_cast<double*>(nullptr));
        } else {
          run(static_cast<float*>(nullptr));
        }
      },
      py::arg("wide"), py::arg("w"), py::arg("g"), py::arg("first"), py::arg("second"),
      py::arg("count"), py::arg("step"));
  m.def("loaded_mpi", [] {
    const auto mpi = mpi_from_loaded_library();
    py::dict d;
    d["path"] = mpi->path();
    d["version"] = mpi->version();
    d["abi"] = std::string{name_of(mpi->abi())};
    if (mpi->usable()) {
      d["threads"] = std::string{name_of(mpi->threads())};
      const int cuda = mpi_cuda_support(*mpi);
      d["cuda"] = cuda < 0 ? "does not tell" : cuda > 0 ? "yes" : "no";
    }
    return d;
  });

  py::class_<HostTuning>(m, "HostTuning")
      .def(py::init<>())
      .def_readwrite("lines_max", &HostTuning::lines_max)
      .def_readwrite("chunk_bytes", &HostTuning::chunk_bytes)
      .def_readwrite("nontemporal_min", &HostTuning::nontemporal_min)
      .def_readwrite("symmetric_min", &HostTuning::symmetric_min)
      .def_readwrite("pull_shared_min", &HostTuning::pull_shared_min)
      .def_readwrite("pull_split_min", &HostTuning::pull_split_min)
      .def_readwrite("spins", &HostTuning::spins)
      .def_readwrite("crowded", &HostTuning::crowded)
      .def_readwrite("assembled_max", &HostTuning::assembled_max)
      .def_readwrite("assembled_by_node_max", &HostTuning::assembled_by_node_max)
      .def_readwrite("lanes", &HostTuning::lanes)
      .def_readwrite("segment_bytes", &HostTuning::segment_bytes);

  // What ranks settle when calls no longer work.
  py::class_<Council, std::shared_ptr<Council>>(m, "Council")
      .def_property_readonly("me", &Council::me)
      .def_property_readonly("size", &Council::size)
      .def("gone", &Council::gone)
      .def("process", &Council::process)
      .def("told", &Council::told)
      .def("join", &Council::join)
      .def("joined", &Council::joined)
      .def("propose", &Council::propose)
      .def("decided", &Council::decided)
      .def("settle", &Council::settle)
      .def("settled", &Council::settled)
      .def("post", [](Council& c, bool part, std::uint64_t tag, std::uint64_t round,
                      const py::bytes& data) { c.post({part, tag, round}, data); })
      .def("fetch",
           [](const Council& c, int q, bool part, std::uint64_t tag,
              std::uint64_t round) -> py::object {
             const auto data = c.fetch(q, {part, tag, round});
             return data ? py::object(py::bytes(*data)) : py::none();
           });
  m.attr("letter_bytes") = Council::kLetter;
  m.attr("outdated") = Council::kOutdated;

  // The flight recorder.
  m.def("set_dump_directory", &set_dump_directory);
  m.def("note_start", &Recorder::note_start);
  m.def("dump_process", &dump_process, py::call_guard<WithoutGil>());
  m.def("dump_on_signal", &dump_on_signal);

  // Work and communicators.
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("done", &Work::done)
      .def(
          "wait",
          [](Work& work, double seconds) {
            const auto start = std::chrono::steady_clock::now();
            for (;;) {
              double slice = 0.05;  // signals are looked at this often
              if (seconds >= 0) {
                const double left =
                    seconds -
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
                if (left <= 0) return work.done();
                slice = std::min(slice, left);
              }
              {
                WithoutGil release;
                if (work.wait(slice)) return true;
              }
              if (PyErr_CheckSignals() != 0) throw PythonError();
            }
          },
          py::arg("seconds"))
      .def("span", &Work::span)
      .def("raise_error", [](Work& work) {
        if (const auto error = work.error()) std::rethrow_exception(error);
      });

  py::class_<TransferState, std::shared_ptr<TransferState>>(m, "PostedTransfer");

  py::class_<Communicator, CommunicatorPtr>(m, "Communicator")
      .def(py::init([](const std::string& name, int rank, int nranks, std::vector<int> node,
                       std::vector<int> local_of, std::vector<int> group,
                       std::shared_ptr<Region> region, std::shared_ptr<MpiTransport> mpi,
                       bool threads, const HostTuning& tuning, bool can_pull,
                       std::size_t slot_bytes, double timeout) {
             CommunicatorConfig config;
             config.name = name;
             config.rank = rank;
             config.nranks = nranks;
             config.node = std::move(node);
             config.local_of = std::move(local_of);
             config.group = std::move(group);
             config.region = std::move(region);
             config.mpi = std::move(mpi);
             config.threads = threads;
             config.tuning = tuning;
             config.slot_bytes = slot_bytes;
             config.can_pull = can_pull;
             config.timeout_s = timeout;
             return make_for_this_process<Communicator>(std::move(config));
           }),
           py::kw_only(), py::arg("name"), py::arg("rank"), py::arg("nranks"), py::arg("node"),
           py::arg("local_of"), py::arg("group"), py::arg("region"), py::arg("mpi"),
           py::arg("threads"), py::arg("tuning"), py::arg("can_pull"), py::arg("slot_bytes"),
           py::arg("timeout"))
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("transports", &Communicator::transports)
      .def_property_readonly("one_region", &Communicator::one_region)
      .def_property_readonly("calls", &Communicator::calls)
      .def_property_readonly("queued", &Communicator::queued)
      .def_property_readonly(
          "tuning", [](Communicator& c) -> HostTuning& { return c.tuning(); },
          py::return_value_policy::reference_internal)
      .def_property_readonly("closed", &Communicator::closed)
      .def_property_readonly("broken", &Communicator::broken)
      .def_property_readonly("why_broken", &Communicator::why_broken)
      .def("watch_peers", &Communicator::watch_peers)
      .def("drain", &Communicator::drain, py::call_guard<WithoutGil>())
      .def_property_readonly("council", &Communicator::council)
      .def("dump", [](const Communicator& c) { return c.recorder()->json(); })
      .def("forget_plans", &Communicator::forget_plans)
      .def("intern", &Communicator::intern)
      .def("define", &Communicator::define)
      .def("caller", &make_caller)
      .def("end_queue", &Communicator::end_queue, py::call_guard<WithoutGil>())
      .def("close", &Communicator::close, py::call_guard<WithoutGil>())
      .def("enter_device_call", &Communicator::enter_device_call)
      .def("look", &Communicator::look)
      .def("abort", &Communicator::abort)
      .def(
          "post_send",
          [](Communicator& c, int peer, std::uint32_t tag, int dtype, std::uintptr_t data,
             std::size_t bytes, bool background) {
            return c.post_send(peer, tag, static_cast<Dtype>(dtype),
                               reinterpret_cast<const void*>(data), bytes, background);
          },
          py::call_guard<WithoutGil>())
      .def(
          "post_recv",
          [](Communicator& c, int peer, std::uint32_t tag, int dtype, std::uintptr_t data,
             std::size_t bytes, bool background) {
            return c.post_recv(peer, tag, static_cast<Dtype>(dtype), reinterpret_cast<void*>(data),
                               bytes, background);
          },
          py::call_guard<WithoutGil>())
      .def("wait", &Communicator::wait)
      .def("transfer_done", &Communicator::done)
      .def("transfer_peer", &Communicator::peer)
      .def_property("timeout", &Communicator::timeout, &Communicator::set_timeout)
      .def("make_segment", &Communicator::make_segment)
      .def("open_segment",
           [](Communicator& c, std::uint64_t id, std::size_t bytes,
              const std::vector<std::string>& handles) {
             return reinterpret_cast<std::uintptr_t>(c.open_segment(id, bytes, handles));
           })
      .def("release_segment", &Communicator::release_segment);

  // GPUs.
#ifdef COLLECTIVES_HAS_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  m.def("device_count", [] {
    std::string why;
    const int count = device_count(&why);
    return std::make_pair(count, why);
  });
  using Unlocked = py::call_guard<WithoutGil>;
  py::class_<DeviceCommunicator, std::shared_ptr<DeviceCommunicator>>(m, "DeviceCommunicator")
      .def(py::init([](int rank, int nranks, std::vector<int> node, int device, int sharing,
                       int max_blocks, double timeout) {
             DeviceConfig config;
             config.rank = rank;
             config.nranks = nranks;
             config.node = std::move(node);
             config.device = device;
             config.sharing = sharing;
             config.max_blocks = max_blocks;
             config.timeout_s = timeout;
             WithoutGil release;
             // Freeing GPU memory can wait for kernels, and these for another thread's rank. A
             // forked child has nothing of the GPU's to free.
             const Birth birth;
             return std::shared_ptr<DeviceCommunicator>(new DeviceCommunicator(config),
                                                        [birth](DeviceCommunicator* object) {
                                                          if (birth.in_child()) return;
                                                          WithoutGil unlocked;
                                                          delete object;
                                                        });
           }),
           py::kw_only(), py::arg("rank"), py::arg("nranks"), py::arg("node"), py::arg("device"),
           py::arg("sharing"), py::arg("max_blocks"), py::arg("timeout"))
      .def_property_readonly("blocks", &DeviceCommunicator::blocks)
      // `home`: "device", "pinned" or "shared".
      .def(
          "allocate",
          [](DeviceCommunicator& device, const std::string& home) {
            device.allocate(home == "device"   ? Home::device
                            : home == "pinned" ? Home::pinned
                                               : Home::shared);
          },
          py::arg("home"), Unlocked())
      .def("handle", &DeviceCommunicator::handle)
      .def("open", &DeviceCommunicator::open, Unlocked())
      .def("probe_write", &DeviceCommunicator::probe_write, Unlocked())
      .def("probe_check", &DeviceCommunicator::probe_check, Unlocked())
      .def("meet", &DeviceCommunicator::meet, Unlocked())
      .def("define", &DeviceCommunicator::define)
      .def("keeps_lines", &DeviceCommunicator::keeps_lines)
      .def("use_lines", &DeviceCommunicator::use_lines)
      .def("make_segment", &DeviceCommunicator::make_segment, Unlocked())
      .def("open_segment", &DeviceCommunicator::open_segment, Unlocked())
      .def("release_segment", &DeviceCommunicator::release_segment, Unlocked())
      .def("export_array",
           [](DeviceCommunicator& device, std::uintptr_t address, std::uint64_t bytes) {
             std::string why;
             WithoutGil release;
             std::string handle = device.export_array(address, bytes, &why);
             return std::make_pair(std::move(handle), std::move(why));
           })
      .def("open_array", &DeviceCommunicator::open_array, Unlocked())
      .def("caller",
           [](std::shared_ptr<DeviceCommunicator> device, CommunicatorPtr comm) {
             device->record_to(comm->recorder());
             return py::reinterpret_steal<py::object>(
                 make_device_call(std::move(comm), std::move(device)));
           })
      // [(sends, peer, tag, dtype, address, count)], stream
      .def("transfer",
           [](DeviceCommunicator& device,
              const std::vector<
                  std::tuple<bool, int, std::uint32_t, int, std::uintptr_t, std::uint64_t>>& list,
              std::uintptr_t stream) {
             std::vector<DeviceTransfer> transfers;
             for (const auto& [sends, peer, tag, dtype, address, count] : list)
               transfers.push_back({sends, peer, tag, static_cast<Dtype>(dtype), address, count});
             WithoutGil release;  // a launch can wait for room in the stream's queue
             device.transfer(transfers, stream);
           })
      .def("check", &DeviceCommunicator::check)
      .def("idle", &DeviceCommunicator::idle)
      // `kind`: as in name_of().
      .def(
          "abort",
          [](DeviceCommunicator& device, const std::string& reason, const std::string& kind) {
            ErrorKind why = ErrorKind::aborted;
            for (const ErrorKind each : {ErrorKind::peer_died, ErrorKind::mismatch})
              if (kind == name_of(each)) why = each;
            device.abort(reason, why);
          },
          py::arg("reason"), py::arg("kind") = name_of(ErrorKind::aborted), Unlocked())
      .def("close", &DeviceCommunicator::close, Unlocked());

  m.def(
      "device_options",
      [](std::string algorithm, int blocks, std::uint64_t chunk, bool lines, bool pull) {
        DeviceOptions options;
        options.algorithm = std::move(algorithm);
        options.blocks = blocks;
        options.chunk = chunk;
        options.lines = lines;
        options.pull = pull;
        return py::reinterpret_steal<py::object>(make_device_options(std::move(options)));
      },
      py::arg("algorithm"), py::kw_only(), py::arg("blocks") = 0, py::arg("chunk") = 0,
      py::arg("lines") = false, py::arg("pull") = false);

  py::class_<Staging, std::shared_ptr<Staging>>(m, "Staging")
      .def(py::init([](int device, std::size_t slot_bytes) {
             WithoutGil release;
             const Birth birth;
             return std::shared_ptr<Staging>(new Staging(device, slot_bytes),
                                             [birth](Staging* object) {
                                               if (birth.in_child()) return;
                                               WithoutGil unlocked;
                                               delete object;
                                             });
           }),
           py::kw_only(), py::arg("device"), py::arg("slot_bytes"))
      // `arguments`: what Communicator's own calls take.
      .def("run",
           [](Staging& staging, Communicator& comm, const py::tuple& arguments,
              std::uintptr_t stream) {
             Call call;
             Communicator::Options options;
             if (!parse_call(reinterpret_cast<PyTupleObject*>(arguments.ptr())->ob_item,
                             static_cast<Py_ssize_t>(arguments.size()), comm, &call, &options))
               throw py::error_already_set();
             WithoutGil release;
             staging.run(comm, call, options, stream);
           })
      .def("check", &Staging::check)
      // The communicator's own abort() ends what the calls wait for.
      .def(
          "abort", [](Staging&, const std::string&, const std::string&) {}, py::arg("reason"),
          py::arg("kind") = name_of(ErrorKind::aborted))
      .def("idle", &Staging::idle)
      .def("close", &Staging::close, Unlocked());

  // Streams beside the caller's; streams are numbers.
  py::class_<Mark, std::shared_ptr<Mark>>(m, "Mark")
      .def("hold", &Mark::hold)
      .def("done", &Mark::done)
      .def("wait", &Mark::wait, Unlocked())
      .def("seconds_since", &Mark::seconds_since);
  py::class_<SideStream>(m, "SideStream")
      .def(py::init<int>(), py::arg("device"))
      .def_property_readonly("handle", &SideStream::handle)
      .def("mark", &SideStream::mark)
      .def("begin", &SideStream::begin)
      .def("end", &SideStream::end);

  // Timed loops; see bench.hpp. Times in nanoseconds of CLOCK_MONOTONIC.
  m.def("time_call", [](Communicator& comm, int warmup, int iterations, bool touch_input,
                        py::args args) {
    Call call;
    Communicator::Options options;
    if (!parse_call(reinterpret_cast<PyTupleObject*>(args.ptr())->ob_item,
                    static_cast<Py_ssize_t>(args.size()), comm, &call, &options))
      throw py::error_already_set();
    const std::uint64_t elements =
        std::max(call.count,
                 std::max(call.in.total(comm.size()), call.collective == Collective::all_gather ||
                                                              call.collective == Collective::gather
                                                          ? call.out.length(comm.rank())
                                                          : 0));
    WithoutGil release;
    const BenchClock clock(comm);
    const TouchedInput touched{
        const_cast<std::byte*>(call.input),
        touch_input && call.input != nullptr ? elements * size_of(call.dtype) : 0};
    return pairs_of(time_loop(
        clock, warmup, iterations, touched, [&] { meet(comm); }, [&] { comm.run(call, options); }));
  });
  m.def("time_mpi", [](Communicator& comm, std::uintptr_t mpi_comm, int warmup, int iterations,
                       bool touch_input, const std::string& collective, int dtype, int op, int root,
                       std::uintptr_t in, std::uintptr_t out, std::uint64_t count) {
    const auto mpi = mpi_from_loaded_library();
    const Collective c = collective_from_name(collective);
    const auto d = static_cast<Dtype>(dtype);
    const auto o = static_cast<Op>(op);
    auto* input = reinterpret_cast<std::byte*>(in);
    auto* output = reinterpret_cast<std::byte*>(out);
    const std::size_t bytes = count * size_of(d);
    const int n = comm.size();
    const std::size_t input_bytes =
        c == Collective::reduce_scatter || c == Collective::all_to_all ? bytes * n : bytes;
    const TouchedInput touched{input, touch_input && c != Collective::barrier ? input_bytes : 0};
    const auto body = [&] {
      switch (c) {
        case Collective::all_reduce:
          return mpi->all_reduce(input, output, count, d, o, mpi_comm);
        case Collective::reduce:
          return mpi->reduce(input, output, count, d, o, root, mpi_comm);
        case Collective::reduce_scatter:
          return mpi->reduce_scatter(input, output, count, d, o, mpi_comm);
        case Collective::all_gather:
          return mpi->all_gather(input, output, bytes, mpi_comm);
        case Collective::broadcast:
          return mpi->broadcast(input, bytes, root, mpi_comm);
        case Collective::all_to_all:
          return mpi->all_to_all(input, output, bytes, mpi_comm);
        case Collective::barrier:
          return mpi->barrier(mpi_comm);
        default:
          throw Error(ErrorKind::unsupported, "no peer measurement of " + collective + " over MPI");
      }
    };
    WithoutGil release;
    const BenchClock clock(comm);
    return pairs_of(time_loop(clock, warmup, iterations, touched, [&] { meet(comm); }, body));
  });
  m.def("cache_line_exchange", [](Communicator& comm, int rounds) {
    WithoutGil release;
    return cache_line_exchange(comm, rounds);
  });
}
