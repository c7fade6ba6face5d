// The constants of MPICH and its kin, of the MPI 5 ABI, and of Open MPI.
#include "mpi_constants.hpp"

#include <dlfcn.h>

#include "errors.hpp"

namespace collectives {

// MPICH's numbers; unchanged from 3.0 on, and what Intel MPI, MVAPICH and Cray MPICH promise (the
// "MPICH ABI"). Read from mpi.h of MPICH 4.0.2 and 5.0.2.
MpiConstants mpich_constants() {
  MpiConstants k;
  k.abi = MpiAbi::mpich;
  k.comm_world = 0x44000000;
  k.request_null = 0x2c000000;
  k.errors_return = 0x54000001;
  k.byte = 0x4c00010d;
  k.int64 = 0x4c00083a;
  auto& t = k.dtypes;
  t[mpi_index(Dtype::float32)] = 0x4c00040a;
  t[mpi_index(Dtype::float64)] = 0x4c00080b;
  t[mpi_index(Dtype::int8)] = 0x4c000137;
  t[mpi_index(Dtype::int16)] = 0x4c000238;
  t[mpi_index(Dtype::int32)] = 0x4c000439;
  t[mpi_index(Dtype::int64)] = 0x4c00083a;
  t[mpi_index(Dtype::uint8)] = 0x4c00013b;
  t[mpi_index(Dtype::uint16)] = 0x4c00023c;
  t[mpi_index(Dtype::uint32)] = 0x4c00043d;
  t[mpi_index(Dtype::uint64)] = 0x4c00083e;
  t[mpi_index(Dtype::boolean)] = 0x4c00013f;
  t[mpi_index(Dtype::complex64)] = 0x4c000840;
  t[mpi_index(Dtype::complex128)] = 0x4c001041;
  auto& o = k.ops;
  o[mpi_index(Op::max)] = 0x58000001;
  o[mpi_index(Op::min)] = 0x58000002;
  o[mpi_index(Op::sum)] = 0x58000003;
  o[mpi_index(Op::prod)] = 0x58000004;
  o[mpi_index(Op::band)] = 0x58000006;
  o[mpi_index(Op::bor)] = 0x58000008;
  o[mpi_index(Op::bxor)] = 0x5800000a;
  k.logical_and = 0x58000005;
  k.logical_or = 0x58000007;
  k.logical_xor = 0x58000009;
  k.in_place = reinterpret_cast<void*>(std::intptr_t{-1});
  k.status_ignore = reinterpret_cast<void*>(std::intptr_t{1});
  k.any_source = -2;
  k.status_bytes = 20;
  k.status_source = 8;
  return k;
}

// MPI 5.0, chapter "Application Binary Interface". Read from mpi_abi.h of MPICH 5.0.2.
MpiConstants standard_constants(const std::string& version) {
  MpiConstants k;
  k.abi = MpiAbi::standard;
  k.comm_world = 0x101;
  k.request_null = 0x180;
  // Intel MPI 2021.18 has the numbers of MPI_ERRORS_RETURN and MPI_ERRORS_ABORT swapped.
  k.errors_return = version.find("Intel(R) MPI") != std::string::npos ? 0x142 : 0x143;
  k.byte = 0x247;
  k.int64 = 0x258;
  auto& t = k.dtypes;
  t[mpi_index(Dtype::float32)] = 0x210;
  t[mpi_index(Dtype::float64)] = 0x214;
  t[mpi_index(Dtype::int8)] = 0x240;
  t[mpi_index(Dtype::uint8)] = 0x241;
  t[mpi_index(Dtype::int16)] = 0x248;
  t[mpi_index(Dtype::uint16)] = 0x249;
  t[mpi_index(Dtype::int32)] = 0x250;
  t[mpi_index(Dtype::uint32)] = 0x251;
  t[mpi_index(Dtype::int64)] = 0x258;
  t[mpi_index(Dtype::uint64)] = 0x259;
  t[mpi_index(Dtype::boolean)] = 0x238;
  t[mpi_index(Dtype::complex64)] = 0x212;
  t[mpi_index(Dtype::complex128)] = 0x216;
  auto& o = k.ops;
  o[mpi_index(Op::sum)] = 0x21;
  o[mpi_index(Op::min)] = 0x22;
  o[mpi_index(Op::max)] = 0x23;
  o[mpi_index(Op::prod)] = 0x24;
  o[mpi_index(Op::band)] = 0x28;
  o[mpi_index(Op::bor)] = 0x29;
  o[mpi_index(Op::bxor)] = 0x2a;
  k.logical_and = 0x30;
  k.logical_or = 0x31;
  k.logical_xor = 0x32;
  k.in_place = reinterpret_cast<void*>(std::intptr_t{1});
  k.status_ignore = nullptr;
  k.any_source = -1;
  k.any_tag = -2;
  k.thread_step = 1024;
  k.status_bytes = 32;
  k.status_source = 0;
  return k;
}

std::uintptr_t address_of(void* library, const std::string& path, const char* name) {
  void* p = dlsym(library, name);
  if (p == nullptr) {
    throw Error(ErrorKind::unsupported,
                path + " lacks " + name +
                    ": an MPI 3.1 or newer is needed (Open MPI 4, MPICH 3.2 or later)");
  }
  return reinterpret_cast<std::uintptr_t>(p);
}

// Open MPI's handles are addresses of its global objects. Read from mpi.h of Open MPI 4.1.4
// and 5.0.11.
MpiConstants open_mpi_constants(void* library, const std::string& path) {
  auto at = [&](const char* name) { return address_of(library, path, name); };
  MpiConstants k;
  k.abi = MpiAbi::open_mpi;
  k.comm_world = at("ompi_mpi_comm_world");
  k.request_null = at("ompi_request_null");
  k.errors_return = at("ompi_mpi_errors_return");
  k.byte = at("ompi_mpi_byte");
  k.int64 = at("ompi_mpi_int64_t");
  auto& t = k.dtypes;
  t[mpi_index(Dtype::float32)] = at("ompi_mpi_float");
  t[mpi_index(Dtype::float64)] = at("ompi_mpi_double");
  t[mpi_index(Dtype::int8)] = at("ompi_mpi_int8_t");
  t[mpi_index(Dtype::int16)] = at("ompi_mpi_int16_t");
  t[mpi_index(Dtype::int32)] = at("ompi_mpi_int32_t");
  t[mpi_index(Dtype::int64)] = at("ompi_mpi_int64_t");
  t[mpi_index(Dtype::uint8)] = at("ompi_mpi_uint8_t");
  t[mpi_index(Dtype::uint16)] = at("ompi_mpi_uint16_t");
  t[mpi_index(Dtype::uint32)] = at("ompi_mpi_uint32_t");
  t[mpi_index(Dtype::uint64)] = at("ompi_mpi_uint64_t");
  t[mpi_index(Dtype::boolean)] = at("ompi_mpi_c_bool");
  t[mpi_index(Dtype::complex64)] = at("ompi_mpi_c_float_complex");
  t[mpi_index(Dtype::complex128)] = at("ompi_mpi_c_double_complex");
  auto& o = k.ops;
  o[mpi_index(Op::sum)] = at("ompi_mpi_op_sum");
  o[mpi_index(Op::prod)] = at("ompi_mpi_op_prod");
  o[mpi_index(Op::min)] = at("ompi_mpi_op_min");
  o[mpi_index(Op::max)] = at("ompi_mpi_op_max");
  o[mpi_index(Op::band)] = at("ompi_mpi_op_band");
  o[mpi_index(Op::bor)] = at("ompi_mpi_op_bor");
  o[mpi_index(Op::bxor)] = at("ompi_mpi_op_bxor");
  k.logical_and = at("ompi_mpi_op_land");
  k.logical_or = at("ompi_mpi_op_lor");
  k.logical_xor = at("ompi_mpi_op_lxor");
  k.in_place = reinterpret_cast<void*>(std::intptr_t{1});
  k.status_ignore = nullptr;
  k.any_source = -1;
  k.status_bytes = 24;
  k.status_source = 0;
  return k;
}

}  // namespace collectives
