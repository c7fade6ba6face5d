// What mpi.h would have told us, for each ABI: handles, types, operations, special values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "mpi.hpp"
#include "types.hpp"

namespace collectives {

// Handles are as wide as the widest ABI's.
struct MpiConstants {
  MpiAbi abi = MpiAbi::mpich;
  std::uintptr_t comm_world = 0;
  std::uintptr_t request_null = 0;
  std::uintptr_t errors_return = 0;
  std::uintptr_t byte = 0;
  std::uintptr_t int64 = 0;
  std::array<std::uintptr_t, kDtypeCount> dtypes{};  // 0: no such type
  // Indexed by Op; avg and premul_sum have no equivalent.
  std::array<std::uintptr_t, kOpCount> ops{};
  std::uintptr_t logical_or = 0, logical_and = 0, logical_xor = 0;  // reductions of booleans
  void* in_place = nullptr;
  void* status_ignore = nullptr;
  int any_source = -1;
  int any_tag = -1;
  int thread_step = 1;  // MPI_THREAD_FUNNELED; the other levels are multiples
  int status_bytes = 0;
  int status_source = 0;  // offset of MPI_SOURCE
};

// Where a dtype and an operation are in the arrays.
constexpr std::size_t mpi_index(Dtype dtype) { return static_cast<std::size_t>(dtype); }
constexpr std::size_t mpi_index(Op op) { return static_cast<std::size_t>(op); }

MpiConstants mpich_constants();
// `version`: what the library says of itself; some deviate from the standard.
MpiConstants standard_constants(const std::string& version);
// `library`: a handle of dlopen, and the path that errors name.
MpiConstants open_mpi_constants(void* library, const std::string& path);

// The address of a symbol. Throws ErrorKind::unsupported if the library lacks it.
std::uintptr_t address_of(void* library, const std::string& path, const char* name);

}  // namespace collectives
