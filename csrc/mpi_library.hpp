// An MPI made of a loaded library and the constants of its ABI.
#pragma once

#include <memory>
#include <string>

#include "mpi.hpp"
#include "mpi_constants.hpp"

namespace collectives {

// `library` is a handle of dlopen that stays open. Throws ErrorKind::unsupported if the library
// lacks a function.
std::shared_ptr<Mpi> make_mpi(void* library, std::string path, std::string version,
                              const MpiConstants& constants);

}  // namespace collectives
