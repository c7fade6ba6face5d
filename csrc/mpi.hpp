// MPI without mpi.h and without linking: the functions of the libmpi that this process has already
// loaded (mpi4py loads it), called through the ABI it speaks. One binary serves Open MPI 4 and 5
// (pointer handles, constants are symbols), the MPICH family: MPICH 3-5, Intel MPI, MVAPICH, Cray
// (int handles, constants are numbers) and the standard ABI of MPI 5 (pointer handles, constants
// are numbers).
//
// Handles come from mpi4py as integers (MPI._handleof(comm)) and stay integers here, whatever the
// ABI.
//
// Threads: with MPI_THREAD_MULTIPLE calls go straight through; with SERIALIZED they take one lock
// of this process (which does not cover calls that mpi4py itself makes); with less, only the main
// thread may call, see any_thread().
//
// Errors: every call throws Error(ErrorKind::system) with the MPI function, its arguments in words
// and MPI's own text, if the communicator returns errors (those of comm_dup() do, mpi4py sets
// COMM_WORLD so; on others MPI may abort by itself). Arguments MPI cannot take (a count above
// INT_MAX that cannot be split, an op it lacks) throw ErrorKind::unsupported.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "types.hpp"

namespace collectives {

using MpiComm = std::uintptr_t;

// A request in flight; `handle` is 0 once it is complete, cancelled or freed.
struct MpiRequest {
  std::uintptr_t handle = 0;
  explicit operator bool() const { return handle != 0; }
};

struct MpiStatus {
  int source = -1;
  std::size_t bytes = 0;
  bool cancelled = false;
};

enum class MpiThreads { single, funneled, serialized, multiple };
enum class MpiAbi { open_mpi, mpich, standard };

std::string_view name_of(MpiThreads threads);
std::string_view name_of(MpiAbi abi);

class Mpi {
 public:
  static constexpr int any_source = -1000;
  static constexpr int any_tag = -1000;
  static constexpr int max_tag = 32767;  // what every MPI allows

  virtual ~Mpi() = default;

  // --- the library ---
  virtual MpiAbi abi() const = 0;
  virtual const std::string& path() const = 0;     // of the shared object
  virtual const std::string& version() const = 0;  // MPI_Get_library_version, first line
  virtual bool initialized() = 0;                  // also after finalize, as in MPI
  virtual bool finalized() = 0;
  virtual MpiThreads threads() = 0;  // throws before MPI is initialized
  // True if threads other than the main one may call MPI (locks are taken here where needed).
  bool any_thread() { return threads() >= MpiThreads::serialized; }
  // True between initialize and finalize.
  bool usable() { return initialized() && !finalized(); }

  // --- communicators ---
  virtual MpiComm comm_world() const = 0;
  virtual int rank(MpiComm comm) = 0;
  virtual int size(MpiComm comm) = 0;
  // Collective over `comm`; the duplicate returns errors. Polls and yields, so it works with more
  // ranks than cores, and throws ErrorKind::deadline if after `timeout_s` some rank has not come.
  virtual MpiComm comm_dup(MpiComm comm, double timeout_s = 300) = 0;
  virtual void comm_free(MpiComm comm) = 0;

  // --- point to point, bytes; nothing here blocks ---
  virtual MpiRequest isend(const void* data, std::size_t bytes, int dest, int tag,
                           MpiComm comm) = 0;
  virtual MpiRequest irecv(void* data, std::size_t bytes, int source, int tag, MpiComm comm) = 0;
  // True if complete (then the request is 0 and *status, where given, filled); true at once for a
  // request that is 0.
  virtual bool test(MpiRequest& request, MpiStatus* status = nullptr) = 0;
  virtual bool test_all(std::vector<MpiRequest>& requests) = 0;  // all or nothing
  // The indices of the requests that completed now; empty if none did (or none is in flight).
  virtual std::vector<int> test_some(std::vector<MpiRequest>& requests) = 0;
  // Marks for cancellation; complete it with test(). Receives end soon; sends may not (Open MPI
  // cannot cancel them).
  virtual void cancel(MpiRequest& request) = 0;
  // Lets go of a request; its buffer stays in use for as long as MPI pleases.
  virtual void request_free(MpiRequest& request) = 0;
  // `source` may be any_source, `tag` any_tag.
  virtual bool iprobe(int source, int tag, MpiComm comm, MpiStatus* status) = 0;

  // --- collectives, blocking inside MPI (setup, and the peer in benchmarks) ---
  // Reductions run on the elements (float16, bfloat16, float8 and avg have no equivalent in MPI:
  // see why_unsupported); movements take bytes. Buffers are disjoint or, for in place: input ==
  // output (all_gather: input where its part of output is). Counts above INT_MAX: all_reduce,
  // reduce and broadcast are split, the others throw.
  virtual std::string why_unsupported(Op op, Dtype dtype) const = 0;  // "" where MPI can reduce so
  virtual void barrier(MpiComm comm) = 0;
  virtual void all_reduce(const void* in, void* out, std::size_t count, Dtype dtype, Op op,
                          MpiComm comm) = 0;
  // `count` elements a rank come out; count * size go in.
  virtual void reduce_scatter(const void* in, void* out, std::size_t count, Dtype dtype, Op op,
                              MpiComm comm) = 0;
  virtual void reduce(const void* in, void* out, std::size_t count, Dtype dtype, Op op, int root,
                      MpiComm comm) = 0;
  virtual void broadcast(void* data, std::size_t bytes, int root, MpiComm comm) = 0;
  virtual void all_gather(const void* in, void* out, std::size_t bytes,
                          MpiComm comm) = 0;  // bytes: one rank's part
  virtual void all_to_all(const void* in, void* out, std::size_t bytes,
                          MpiComm comm) = 0;  // bytes: one pair's part
};

// The MPI that this process has loaded. Throws ErrorKind::unsupported if none is ("import mpi4py
// first"), if its ABI is unknown, and if several are and it is not plain which one is in use (both
// paths are named; of two loaded libraries the one that is initialized wins).
std::shared_ptr<Mpi> mpi_from_loaded_library();

// What the library answers when it is asked whether it takes device pointers of CUDA: 1, 0, or -1
// where it has no MPIX_Query_cuda_support to be asked.
int mpi_cuda_support(const Mpi& mpi);

}  // namespace collectives
