// Timed loops to Python; see bench.hpp. Times in nanoseconds of CLOCK_MONOTONIC.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bench.hpp"
#include "bindings.hpp"
#include "communicator.hpp"
#include "errors.hpp"
#include "mpi.hpp"
#include "python_calls.hpp"
#include "types.hpp"

namespace py = pybind11;

namespace collectives {
namespace {

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

void bind_bench(py::module_& m) {
  m.def("time_call", [](Communicator& comm, int warmup, int iterations, bool touch_input,
                        py::args args) {
    Call call;
    Communicator::Options options;
    if (!parse_call(reinterpret_cast<PyTupleObject*>(args.ptr())->ob_item,
                    static_cast<Py_ssize_t>(args.size()), comm.size(), &call, &options))
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

}  // namespace collectives
