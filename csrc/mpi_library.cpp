// The calls: MPI's functions by their addresses in a loaded library, with its own width of handles.
#include "mpi_library.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace collectives {
namespace {

constexpr const char* kFinalized = "MPI is finalized: close communicators before MPI.Finalize()";

// One lock for all of this process's calls under MPI_THREAD_SERIALIZED.
std::mutex serialized_mutex;

// `Handle`: int (MPICH) or void* (Open MPI, MPI 5). All handle types of one ABI have the same
// width.
template <class Handle>
class MpiLibrary final : public Mpi {
 public:
  MpiLibrary(void* library, std::string path, std::string version, const MpiConstants& constants)
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
    if (k_.dtypes[mpi_index(dtype)] == 0) {
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
    explicit Turn(MpiLibrary& library) {
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
    std::uintptr_t native = k_.ops[mpi_index(op)];
    if (dtype == Dtype::boolean) {
      const bool any = op == Op::sum || op == Op::max || op == Op::bor;
      native = op == Op::bxor ? k_.logical_xor : any ? k_.logical_or : k_.logical_and;
    }
    return {narrow(k_.dtypes[mpi_index(dtype)]), narrow(native), size_of(dtype)};
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
  MpiConstants k_;
  Functions f_{};
  std::atomic<int> level_{-1};
};

}  // namespace

std::shared_ptr<Mpi> make_mpi(void* library, std::string path, std::string version,
                              const MpiConstants& constants) {
  if (constants.abi == MpiAbi::mpich)
    return std::make_shared<MpiLibrary<int>>(library, std::move(path), std::move(version),
                                             constants);
  return std::make_shared<MpiLibrary<void*>>(library, std::move(path), std::move(version),
                                             constants);
}

}  // namespace collectives
