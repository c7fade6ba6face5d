// Communicators to Python: their tuning, calls, work under way, the council of survivors, and the
// flight recorder. The calls themselves are in python_calls.cpp.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "communicator.hpp"
#include "council.hpp"
#include "python_calls.hpp"
#include "recorder.hpp"
#include "types.hpp"

namespace py = pybind11;

namespace collectives {
namespace {

// Does it send, peer, tag, dtype, data, bytes.
using MessageTuple = std::tuple<bool, int, std::uint32_t, int, std::uintptr_t, std::size_t>;

Communicator::Message message_of(const MessageTuple& t) {
  return {std::get<0>(t),
          std::get<1>(t),
          std::get<2>(t),
          static_cast<Dtype>(std::get<3>(t)),
          reinterpret_cast<void*>(std::get<4>(t)),
          std::get<5>(t)};
}

py::tuple make_caller(const CommunicatorPtr& comm) {
  const auto wrap = [](std::shared_ptr<Work> work) {
    return py::cast(std::move(work)).release().ptr();
  };
  py::list functions;
  for (PyObject* f : make_call_functions(comm, wrap))
    functions.append(py::reinterpret_steal<py::object>(f));
  return py::tuple(functions);
}

}  // namespace

void bind_tuning(py::module_& m) {
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
}

// What ranks settle when calls no longer work.
void bind_council(py::module_& m) {
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
}

void bind_recorder(py::module_& m) {
  m.def("set_dump_directory", &set_dump_directory);
  m.def("note_start", &Recorder::note_start);
  m.def("dump_process", &dump_process, py::call_guard<WithoutGil>());
  m.def("dump_on_signal", &dump_on_signal);
}

void bind_communicator(py::module_& m) {
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
      .def_property_readonly("lends", &Communicator::lends)
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
      .def("look", [](Communicator& c) { c.look(); })
      .def("look_around", [](Communicator& c) { c.look_around(); })
      .def("abort", &Communicator::abort)
      .def(
          "post",
          [](Communicator& c, const MessageTuple& message, bool background) {
            return c.post(message_of(message), background);
          },
          py::call_guard<WithoutGil>())
      .def("transfer",
           [](Communicator& c, const std::vector<MessageTuple>& tuples) {
             std::vector<Communicator::Message> messages;
             for (const MessageTuple& t : tuples) messages.push_back(message_of(t));
             c.transfer(messages);
           })
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
}

}  // namespace collectives
