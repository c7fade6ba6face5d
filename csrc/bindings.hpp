// The parts of the Python module. bindings.cpp calls them in the order below: a class comes before
// the functions that take or return it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "communicator.hpp"

namespace collectives {

using CommunicatorPtr = std::shared_ptr<Communicator>;

void bind_schedules(pybind11::module_& m);  // bindings_schedules.cpp
void bind_simulation(pybind11::module_& m);
void bind_regions(pybind11::module_& m);  // bindings_links.cpp
void bind_mpi(pybind11::module_& m);
void bind_tuning(pybind11::module_& m);  // bindings_communicator.cpp
void bind_council(pybind11::module_& m);
void bind_recorder(pybind11::module_& m);
void bind_communicator(pybind11::module_& m);
void bind_device(pybind11::module_& m);  // bindings_device.cpp
void bind_staging(pybind11::module_& m);
void bind_side_streams(pybind11::module_& m);
void bind_bench(pybind11::module_& m);  // bindings_bench.cpp

}  // namespace collectives
