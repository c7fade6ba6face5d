// The Python module collectives._core. Thin: names and pointers in, names and numbers out; what
// arrays and errors mean to Python lives in the package. The calls themselves are plain CPython
// functions (not pybind11's), since a 4-byte all_reduce takes less time than pybind11 needs to look
// at its arguments.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "bench.hpp"
#include "communicator.hpp"
#include "errors.hpp"
#include "mpi.hpp"
#include "plan.hpp"
#include "reduce.hpp"
#include "schedule.hpp"
#include "transport_mpi.hpp"
#include "types.hpp"

#ifndef COLLECTIVES_COMMIT
#define COLLECTIVES_COMMIT "unknown"
#endif

namespace py = pybind11;
using namespace collectives;

namespace {

// ---- errors
// ------------------------------------------------------------------------------------------------------------

const char* python_class(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::mismatch:
      return "MismatchError";
    case ErrorKind::deadline:
      return "DeadlineError";
    case ErrorKind::peer_died:
      return "PeerDiedError";
    case ErrorKind::aborted:
      return "AbortedError";
    case ErrorKind::closed:
      return "ClosedError";
    case ErrorKind::unsupported:
      return "UnsupportedError";
    case ErrorKind::invalid:
    case ErrorKind::system:
      break;
  }
  return "CollectiveError";
}

void set_python_error(const char* name, const char* text) {
  const py::object type = py::module_::import("collectives.errors").attr(name);
  PyErr_SetString(type.ptr(), text);
}

// Turns the exception in flight into Python's.
void translate() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const Error& error) {
    set_python_error(python_class(error.kind()), error.what());
  } catch (const ScheduleError& error) {
    set_python_error("ScheduleError", error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

// ---- the GIL during waits
// ----------------------------------------------------------------------------------------------

void* give_up_gil() { return PyGILState_Check() ? PyEval_SaveThread() : nullptr; }
void take_back_gil(void* state) {
  if (state != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}
// Ctrl-C and other signals end a wait: their handler's exception is thrown through the engine.
void look_at_signals(void*& state) {
  if (state == nullptr) return;
  PyEval_RestoreThread(static_cast<PyThreadState*>(state));
  state = nullptr;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  state = PyEval_SaveThread();
}

// ---- calls
// -------------------------------------------------------------------------------------------------------------

using CommunicatorPtr = std::shared_ptr<Communicator>;

// Data above this are moved without the GIL: the time to give it up (about 0.1 us) no longer shows.
constexpr std::size_t kHoldGilBelow = 32 << 10;

struct Caller {
  CommunicatorPtr comm;
  // all_reduce(x) with defaults: which algorithm serves up to how many bytes.
  std::vector<std::pair<std::uint64_t, int>> all_reduce_choice;
};

Caller& caller_of(PyObject* self) {
  return *static_cast<Caller*>(PyCapsule_GetPointer(self, "collectives.caller"));
}

void run_call(Caller& caller, const Call& call, const Communicator::Options& options,
              std::size_t bytes) {
  if (bytes < kHoldGilBelow && !caller.comm->config().threads) {
    caller.comm->run(call, options);
  } else {
    py::gil_scoped_release release;
    caller.comm->run(call, options);
  }
}

// The dtype of a struct-module format of one native element, or -1.
int dtype_of_format(const char* format) {
  if (format == nullptr) return static_cast<int>(Dtype::uint8);
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (format[0] == 'Z' && format[1] != 0 && format[2] == 0)
    return format[1] == 'f'   ? static_cast<int>(Dtype::complex64)
           : format[1] == 'd' ? static_cast<int>(Dtype::complex128)
                              : -1;
  if (format[0] == 0 || format[1] != 0) return -1;
  switch (format[0]) {
    case 'e':
      return static_cast<int>(Dtype::float16);
    case 'f':
      return static_cast<int>(Dtype::float32);
    case 'd':
      return static_cast<int>(Dtype::float64);
    case 'b':
      return static_cast<int>(Dtype::int8);
    case 'h':
      return static_cast<int>(Dtype::int16);
    case 'i':
      return static_cast<int>(Dtype::int32);
    case 'l':
    case 'q':
      return static_cast<int>(Dtype::int64);
    case 'B':
      return static_cast<int>(Dtype::uint8);
    case 'H':
      return static_cast<int>(Dtype::uint16);
    case 'I':
      return static_cast<int>(Dtype::uint32);
    case 'L':
    case 'Q':
      return static_cast<int>(Dtype::uint64);
    case '?':
      return static_cast<int>(Dtype::boolean);
    default:
      return -1;
  }
}

// all_reduce_in_place(x) -> bool: sums x over the ranks with the default algorithm if x is a plain
// writable contiguous buffer of a native dtype; False (nothing done) for anything else, which the
// general path then judges.
PyObject* fast_all_reduce(PyObject* self, PyObject* x) {
  Caller& caller = caller_of(self);
  Py_buffer buffer;
  if (PyObject_GetBuffer(x, &buffer, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  const int dtype = dtype_of_format(buffer.format);
  if (dtype < 0 || caller.all_reduce_choice.empty() ||
      size_of(static_cast<Dtype>(dtype)) != static_cast<std::size_t>(buffer.itemsize)) {
    PyBuffer_Release(&buffer);
    Py_RETURN_FALSE;
  }
  Call call;
  call.dtype = static_cast<Dtype>(dtype);
  call.input = static_cast<const std::byte*>(buffer.buf);
  call.output = static_cast<std::byte*>(buffer.buf);
  call.count = static_cast<std::uint64_t>(buffer.len / buffer.itemsize);
  Communicator::Options options;
  const auto bytes = static_cast<std::uint64_t>(buffer.len);
  for (const auto& [limit, algorithm] : caller.all_reduce_choice) {
    options.algorithm = algorithm;
    if (bytes <= limit) break;
  }
  try {
    run_call(caller, call, options, bytes);
  } catch (...) {
    PyBuffer_Release(&buffer);
    translate();
    return nullptr;
  }
  PyBuffer_Release(&buffer);
  Py_RETURN_TRUE;
}

// None -> no blocks; int -> equal blocks; (total,) -> split; [lengths] or ([lengths], [offsets]).
Blocks to_blocks(PyObject* o, int n) {
  if (o == Py_None) return Blocks();
  if (PyLong_Check(o)) return Blocks::equal(PyLong_AsUnsignedLongLong(o));
  const auto numbers = [](PyObject* list) {
    std::vector<std::uint64_t> v;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i)
      v.push_back(PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, i)));
    return v;
  };
  if (PyList_Check(o)) return Blocks::table(numbers(o));
  if (PyTuple_Check(o) && PyTuple_GET_SIZE(o) == 1)
    return Blocks::split(PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(o, 0)), n);
  return Blocks::table(numbers(PyTuple_GET_ITEM(o, 0)), numbers(PyTuple_GET_ITEM(o, 1)));
}

// (collective, dtype, op, root, in, out, count, in_blocks, out_blocks, algorithm, order, re, im):
// numbers throughout.
bool parse_call(PyObject* const* args, Py_ssize_t nargs, const Communicator& comm, Call* call,
                Communicator::Options* options) {
  if (nargs != 13) {
    PyErr_Format(PyExc_TypeError, "a call takes 13 arguments, not %zd", nargs);
    return false;
  }
  call->collective = static_cast<Collective>(PyLong_AsLong(args[0]));
  call->dtype = static_cast<Dtype>(PyLong_AsLong(args[1]));
  call->op = static_cast<Op>(PyLong_AsLong(args[2]));
  call->root = static_cast<int>(PyLong_AsLong(args[3]));
  call->input = reinterpret_cast<const std::byte*>(PyLong_AsUnsignedLongLong(args[4]));
  call->output = reinterpret_cast<std::byte*>(PyLong_AsUnsignedLongLong(args[5]));
  call->count = PyLong_AsUnsignedLongLong(args[6]);
  call->in = to_blocks(args[7], comm.size());
  call->out = to_blocks(args[8], comm.size());
  options->algorithm = static_cast<int>(PyLong_AsLong(args[9]));
  options->order = static_cast<Order>(PyLong_AsLong(args[10]));
  options->factor[0] = PyFloat_AsDouble(args[11]);
  options->factor[1] = PyFloat_AsDouble(args[12]);
  return PyErr_Occurred() == nullptr;
}

PyObject* fast_call(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Caller& caller = caller_of(self);
  try {
    Call call;
    Communicator::Options options;
    if (!parse_call(args, nargs, *caller.comm, &call, &options)) return nullptr;
    const std::uint64_t elements =
        call.count + call.in.total(caller.comm->size()) + call.out.total(caller.comm->size());
    run_call(caller, call, options, elements * size_of(call.dtype));
  } catch (...) {
    translate();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* fast_submit(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Caller& caller = caller_of(self);
  try {
    Call call;
    Communicator::Options options;
    if (!parse_call(args, nargs, *caller.comm, &call, &options)) return nullptr;
    return py::cast(caller.comm->submit(std::move(call), options)).release().ptr();
  } catch (...) {
    translate();
    return nullptr;
  }
}

PyMethodDef caller_methods[] = {
    {"all_reduce_in_place", fast_all_reduce, METH_O,
     "Sums a plain buffer in place; False if it is not one."},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fast_call)), METH_FASTCALL,
     "Runs a call."},
    {"submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fast_submit)),
     METH_FASTCALL, "Queues a call."},
};

py::tuple make_caller(const CommunicatorPtr& comm,
                      const std::vector<std::pair<std::uint64_t, int>>& all_reduce_choice) {
  const py::capsule capsule(
      new Caller{comm, all_reduce_choice}, "collectives.caller", [](PyObject* o) {
        delete static_cast<Caller*>(PyCapsule_GetPointer(o, "collectives.caller"));
      });
  py::tuple functions(3);
  for (int i = 0; i < 3; ++i)
    functions[i] =
        py::reinterpret_steal<py::object>(PyCFunction_New(&caller_methods[i], capsule.ptr()));
  return functions;
}

// ---- schedules
// ---------------------------------------------------------------------------------------------------------

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

// ---- timing
// ------------------------------------------------------------------------------------------------------------

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
    } catch (const Error&) {
      translate();
    } catch (const ScheduleError&) {
      translate();
    }
  });
  Communicator::on_enter_slow = give_up_gil;
  Communicator::on_leave_slow = take_back_gil;
  Communicator::on_tick = look_at_signals;

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
             py::gil_scoped_release release;
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
  m.def("loaded_mpi", [] {
    const auto mpi = mpi_from_loaded_library();
    py::dict d;
    d["path"] = mpi->path();
    d["version"] = mpi->version();
    d["abi"] = std::string{name_of(mpi->abi())};
    if (mpi->usable()) d["threads"] = std::string{name_of(mpi->threads())};
    return d;
  });

  py::class_<HostTuning>(m, "HostTuning")
      .def(py::init<>())
      .def_readwrite("lines_max", &HostTuning::lines_max)
      .def_readwrite("chunk_bytes", &HostTuning::chunk_bytes)
      .def_readwrite("nontemporal_min", &HostTuning::nontemporal_min)
      .def_readwrite("symmetric_min", &HostTuning::symmetric_min)
      .def_readwrite("spins", &HostTuning::spins)
      .def_readwrite("lanes", &HostTuning::lanes)
      .def_readwrite("segment_bytes", &HostTuning::segment_bytes);

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
                py::gil_scoped_release release;
                if (work.wait(slice)) return true;
              }
              if (PyErr_CheckSignals() != 0) throw py::error_already_set();
            }
          },
          py::arg("seconds"))
      .def("raise_error", [](Work& work) {
        if (const auto error = work.error()) std::rethrow_exception(error);
      });

  py::class_<TransferState, std::shared_ptr<TransferState>>(m, "PostedTransfer");

  py::class_<Communicator, CommunicatorPtr>(m, "Communicator")
      .def(py::init([](int rank, int nranks, std::vector<int> node, std::vector<int> local_of,
                       std::shared_ptr<Region> region, std::shared_ptr<MpiTransport> mpi,
                       bool threads, const HostTuning& tuning, double timeout) {
             CommunicatorConfig config;
             config.rank = rank;
             config.nranks = nranks;
             config.node = std::move(node);
             config.local_of = std::move(local_of);
             config.region = std::move(region);
             config.mpi = std::move(mpi);
             config.threads = threads;
             config.tuning = tuning;
             config.timeout_s = timeout;
             return std::make_shared<Communicator>(std::move(config));
           }),
           py::kw_only(), py::arg("rank"), py::arg("nranks"), py::arg("node"), py::arg("local_of"),
           py::arg("region"), py::arg("mpi"), py::arg("threads"), py::arg("tuning"),
           py::arg("timeout"))
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("transports", &Communicator::transports)
      .def_property_readonly("one_region", &Communicator::one_region)
      .def_property_readonly("calls", &Communicator::calls)
      .def_property_readonly("closed", &Communicator::closed)
      .def_property_readonly("broken", &Communicator::broken)
      .def("intern", &Communicator::intern)
      .def("define", &Communicator::define)
      .def("caller", &make_caller)
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Communicator::abort)
      .def(
          "post_send",
          [](Communicator& c, int peer, std::uint32_t tag, int dtype, std::uintptr_t data,
             std::size_t bytes, bool background) {
            return c.post_send(peer, tag, static_cast<Dtype>(dtype),
                               reinterpret_cast<const void*>(data), bytes, background);
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "post_recv",
          [](Communicator& c, int peer, std::uint32_t tag, int dtype, std::uintptr_t data,
             std::size_t bytes, bool background) {
            return c.post_recv(peer, tag, static_cast<Dtype>(dtype), reinterpret_cast<void*>(data),
                               bytes, background);
          },
          py::call_guard<py::gil_scoped_release>())
      .def("wait", &Communicator::wait, py::call_guard<py::gil_scoped_release>())
      .def("transfer_done", &Communicator::done)
      .def("make_segment", &Communicator::make_segment)
      .def("open_segment",
           [](Communicator& c, std::uint64_t id, std::size_t bytes,
              const std::vector<std::string>& handles) {
             return reinterpret_cast<std::uintptr_t>(c.open_segment(id, bytes, handles));
           })
      .def("release_segment", &Communicator::release_segment);

  // Timed loops; see bench.hpp. Times in nanoseconds of CLOCK_MONOTONIC.
  m.def("time_call",
        [](Communicator& comm, int warmup, int iterations, bool touch_input, py::args args) {
          Call call;
          Communicator::Options options;
          if (!parse_call(reinterpret_cast<PyTupleObject*>(args.ptr())->ob_item,
                          static_cast<Py_ssize_t>(args.size()), comm, &call, &options))
            throw py::error_already_set();
          const std::uint64_t elements = std::max(
              call.count,
              std::max(call.in.total(comm.size()), call.collective == Collective::all_gather ||
                                                           call.collective == Collective::gather
                                                       ? call.out.length(comm.rank())
                                                       : 0));
          py::gil_scoped_release release;
          const BenchClock clock(comm);
          const TouchedInput touched{const_cast<std::byte*>(call.input),
                                     touch_input ? elements * size_of(call.dtype) : 0};
          return pairs_of(time_loop(
              clock,              warmup, iterations, touched, [&] { meet(comm); }, [&] { comm.run(call, options); }));
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
    py::gil_scoped_release release;
    const BenchClock clock(comm);
    return pairs_of(time_loop(clock, warmup, iterations, touched, [&] { meet(comm); }, body));
  });
  m.def("cache_line_exchange", [](Communicator& comm, int rounds) {
    py::gil_scoped_release release;
    return cache_line_exchange(comm, rounds);
  });
}
