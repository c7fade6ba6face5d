// GPUs to Python: the engine's ranks, staged calls, and streams beside the caller's.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "communicator.hpp"
#include "device.hpp"
#include "errors.hpp"
#include "python_calls.hpp"
#include "side_stream.hpp"
#include "staging.hpp"
#include "types.hpp"

namespace py = pybind11;

namespace collectives {
namespace {

using Unlocked = py::call_guard<WithoutGil>;

}  // namespace

void bind_device(py::module_& m) {
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
  m.def("gpu_of", &gpu_of, py::arg("pointer"), Unlocked());
  py::class_<DeviceCommunicator, std::shared_ptr<DeviceCommunicator>>(m, "DeviceCommunicator")
      .def(py::init([](int rank, int nranks, std::vector<int> node, int device, int sharing,
                       int threads, int max_blocks, double timeout) {
             DeviceConfig config;
             config.rank = rank;
             config.nranks = nranks;
             config.node = std::move(node);
             config.device = device;
             config.sharing = sharing;
             config.threads = threads;
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
           py::arg("sharing"), py::arg("threads"), py::arg("max_blocks"), py::arg("timeout"))
      .def_property_readonly("blocks", &DeviceCommunicator::blocks)
      // `home`: "device", "pinned" or "shared".
      .def(
          "allocate",
          [](DeviceCommunicator& device, const std::string& home, int blocks) {
            device.allocate(home == "device"   ? Home::device
                            : home == "pinned" ? Home::pinned
                                               : Home::shared,
                            blocks);
          },
          py::arg("home"), py::arg("blocks"), Unlocked())
      .def_property_readonly("arena_bytes", &DeviceCommunicator::arena_bytes)
      .def("handle", &DeviceCommunicator::handle)
      .def("open", &DeviceCommunicator::open, Unlocked())
      .def("probe_write", &DeviceCommunicator::probe_write, Unlocked())
      .def("probe_check", &DeviceCommunicator::probe_check, Unlocked())
      .def("meet", &DeviceCommunicator::meet, Unlocked())
      .def("define", &DeviceCommunicator::define, Unlocked())
      .def("keeps_lines", &DeviceCommunicator::keeps_lines)
      .def("use_lines", &DeviceCommunicator::use_lines)
      .def("writes_words", &DeviceCommunicator::writes_words)
      .def("use_copies", &DeviceCommunicator::use_copies)
      .def_property_readonly("captured", &DeviceCommunicator::captured)
      .def_property_readonly("exchanges", &DeviceCommunicator::exchanges)
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
      .def("known_calls",
           [](std::shared_ptr<DeviceCommunicator> device, CommunicatorPtr comm, int ordinal,
              const py::dict& kinds, const py::type& stream_type, std::size_t most) {
             py::list functions;
             for (PyObject* f : make_known_calls(std::move(comm), std::move(device), ordinal,
                                                 kinds.ptr(), stream_type.ptr(), most))
               functions.append(py::reinterpret_steal<py::object>(f));
             return py::tuple(functions);
           })
      // comm, [(sends, peer, tag, dtype, address, count)], stream
      .def("transfer",
           [](DeviceCommunicator& device, const CommunicatorPtr& comm,
              const std::vector<
                  std::tuple<bool, int, std::uint32_t, int, std::uintptr_t, std::uint64_t>>& list,
              std::uintptr_t stream) {
             std::vector<DeviceTransfer> transfers;
             for (const auto& [sends, peer, tag, dtype, address, count] : list)
               transfers.push_back({sends, peer, tag, static_cast<Dtype>(dtype), address, count});
             put_on_gpu(device, [&] {
               comm->look();
               device.transfer(transfers, stream);
             });
           })
      .def("check", &DeviceCommunicator::check)
      .def("idle", &DeviceCommunicator::idle)
      // `kind`: as in name_of().
      .def(
          "abort",
          [](DeviceCommunicator& device, const std::string& reason, const std::string& kind,
             int about) {
            ErrorKind why = ErrorKind::aborted;
            for (const ErrorKind each : {ErrorKind::peer_died, ErrorKind::mismatch})
              if (kind == name_of(each)) why = each;
            device.abort(reason, why, about);
          },
          py::arg("reason"), py::arg("kind") = name_of(ErrorKind::aborted), py::arg("about") = -1,
          Unlocked())
      .def("close", &DeviceCommunicator::close, Unlocked());

  m.def(
      "device_options",
      [](std::string algorithm, int blocks, int straight_blocks, int threads, std::uint64_t chunk,
         bool small, bool lines, bool pull, bool bulk, bool copies) {
        DeviceOptions options;
        options.algorithm = std::move(algorithm);
        options.blocks = blocks;
        options.straight_blocks = straight_blocks;
        options.chunk = chunk;
        options.threads = threads;
        options.small = small;
        options.lines = lines;
        options.pull = pull;
        options.bulk = bulk;
        options.copies = copies;
        return py::reinterpret_steal<py::object>(make_device_options(std::move(options)));
      },
      py::arg("algorithm"), py::kw_only(), py::arg("blocks") = 0, py::arg("straight_blocks") = 0,
      py::arg("threads") = 0, py::arg("chunk") = 0, py::arg("small") = false,
      py::arg("lines") = false, py::arg("pull") = false, py::arg("bulk") = false,
      py::arg("copies") = false);
}

void bind_staging(py::module_& m) {
  py::class_<GpuSlots, std::shared_ptr<GpuSlots>>(m, "GpuSlots")
      .def_property_readonly("slot_bytes", &GpuSlots::slot_bytes);
  py::class_<Staging, std::shared_ptr<Staging>>(m, "Staging")
      .def(py::init([](int device, std::size_t slot_bytes, int threads) {
             WithoutGil release;
             const Birth birth;
             return std::shared_ptr<Staging>(new Staging(device, slot_bytes, threads),
                                             [birth](Staging* object) {
                                               if (birth.in_child()) return;
                                               WithoutGil unlocked;
                                               delete object;
                                             });
           }),
           py::kw_only(), py::arg("device"), py::arg("slot_bytes"), py::arg("threads"))
      // `arguments`: what Communicator's own calls take, for those of the rail if `way` is "rail".
      .def(
          "run",
          [](Staging& staging, Communicator& comm, const py::tuple& arguments,
             std::uintptr_t stream, const std::string& name) {
            const Staging::Way way = name == "rail"        ? Staging::Way::rail
                                     : name == "agreement" ? Staging::Way::agreement
                                                           : Staging::Way::whole;
            Call call;
            Communicator::Options options;
            if (!parse_call(reinterpret_cast<PyTupleObject*>(arguments.ptr())->ob_item,
                            static_cast<Py_ssize_t>(arguments.size()),
                            way == Staging::Way::rail ? staging.rail_size() : comm.size(), &call,
                            &options))
              throw py::error_already_set();
            WithoutGil release;
            staging.run(comm, call, options, stream, way);
          },
          py::arg("comm"), py::arg("arguments"), py::arg("stream"), py::arg("way") = "whole")
      .def("refuse_capture", &Staging::refuse_capture)
      .def("join", &Staging::join, py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("make_scratch", &Staging::make_scratch, Unlocked())
      .def("make_slots", &Staging::make_slots, py::arg("nranks"), Unlocked())
      .def("probe", &Staging::probe, Unlocked())
      .def("go_straight", &Staging::go_straight)
      .def("streams_apart", &Staging::streams_apart, Unlocked())
      .def_property_readonly("straight_calls", &Staging::straight_calls)
      .def("check", &Staging::check)
      // The communicator's own abort() ends what the calls wait for.
      .def(
          "abort", [](Staging&, const std::string&, const std::string&, int) {}, py::arg("reason"),
          py::arg("kind") = name_of(ErrorKind::aborted), py::arg("about") = -1)
      .def("idle", &Staging::idle)
      .def("close", &Staging::close, Unlocked());
}

// Streams are numbers.
void bind_side_streams(py::module_& m) {
  py::class_<Mark, std::shared_ptr<Mark>>(m, "Mark")
      .def("hold", &Mark::hold, Unlocked())  // there may be no room on the stream yet
      .def("done", &Mark::done)
      .def("wait", &Mark::wait, Unlocked())
      .def("seconds_since", &Mark::seconds_since);
  py::class_<SideStream>(m, "SideStream")
      .def(py::init<int, std::uintptr_t>(), py::arg("device"), py::arg("stream") = 0)
      .def_property_readonly("handle", &SideStream::handle)
      .def("mark", &SideStream::mark, Unlocked())
      .def("begin", &SideStream::begin, Unlocked())
      .def("end", &SideStream::end, Unlocked());
  m.def("let_wait", &let_wait, py::arg("device"), py::arg("stream"), py::arg("before"), Unlocked());
  m.def("slowdown", &slowdown, py::arg("device"), py::arg("computing"), py::arg("waiting"),
        Unlocked());
}

}  // namespace collectives
