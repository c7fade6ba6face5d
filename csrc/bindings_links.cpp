// What joins ranks, to Python: regions of shared memory, MPI, and who may read whose memory.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "bindings.hpp"
#include "communicator.hpp"
#include "mpi.hpp"
#include "python_calls.hpp"
#include "region.hpp"
#include "straight.hpp"
#include "transport_mpi.hpp"

namespace py = pybind11;

namespace collectives {

void bind_regions(py::module_& m) {
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
}

void bind_mpi(py::module_& m) {
  py::class_<MpiTransport, std::shared_ptr<MpiTransport>>(m, "MpiTransport")
      .def(py::init([](std::uintptr_t comm, std::size_t slot_bytes, int depth, double timeout,
                       std::shared_ptr<GpuSlots> slots) {
             MpiTransportOptions options;
             options.slot_bytes = slot_bytes;
             options.depth = depth;
             options.timeout_s = timeout;
             options.slots = std::move(slots);
             WithoutGil release;
             return std::make_shared<MpiTransport>(mpi_from_loaded_library(), comm, options);
           }),
           py::arg("comm"), py::kw_only(), py::arg("slot_bytes"), py::arg("depth"),
           py::arg("timeout"), py::arg("slots") = nullptr)
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
    if (mpi->usable()) {
      d["threads"] = std::string{name_of(mpi->threads())};
      const int cuda = mpi_cuda_support(*mpi);
      d["cuda"] = cuda < 0 ? "does not tell" : cuda > 0 ? "yes" : "no";
    }
    return d;
  });
}

}  // namespace collectives
