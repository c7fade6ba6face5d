// The Python module collectives._core. Thin: names and pointers in, names and numbers out; what
// arrays and errors mean to Python lives in the package. The calls themselves are plain CPython
// functions (not pybind11's), since a 4-byte all_reduce takes less time than pybind11 needs to look
// at its arguments.
#include "bindings.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <type_traits>

#include "adam.hpp"
#include "errors.hpp"
#include "python_calls.hpp"
#include "reduce.hpp"
#include "schedule.hpp"
#include "types.hpp"

#ifndef COLLECTIVES_COMMIT
#define COLLECTIVES_COMMIT "unknown"
#endif

namespace py = pybind11;
using namespace collectives;

namespace {

// Names, in the order of the enumerations: the index is the number that calls take.
void bind_names(py::module_& m) {
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
}

void bind_adam(py::module_& m) {
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

  bind_names(m);
  bind_adam(m);
  bind_schedules(m);
  bind_simulation(m);
  bind_regions(m);
  bind_mpi(m);
  bind_tuning(m);
  bind_council(m);
  bind_recorder(m);
  bind_communicator(m);
  bind_device(m);
  bind_staging(m);
  bind_side_streams(m);
  bind_bench(m);
}
