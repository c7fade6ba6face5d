#include "region.hpp"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "errors.hpp"
#include "types.hpp"

namespace collectives {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// What to do about an error of the operating system, where it is known.
const char* cure(int error) {
  switch (error) {
    case EMFILE:
    case ENFILE:
      return "; raise the limit of open files (ulimit -n)";
    case ENOMEM:
      return "; raise the limit of address space (ulimit -v), or free memory";
    case EFBIG:
      return "; raise the limit of file sizes (ulimit -f)";
    case EPERM:
    case ENOSYS:
      return "; the kernel or a container's seccomp profile forbids it: allow it, or start the job "
             "with mpirun, so that MPI carries the data";
    default:
      return "";
  }
}

std::uint64_t mix(std::uint64_t h, std::uint64_t v) {
  h ^= v + 0x9e3779b97f4a7c15ULL + (h << 6) + (h >> 2);
  h *= 0xff51afd7ed558ccdULL;
  return h ^ (h >> 33);
}

}  // namespace

void system_failed(const std::string& what) {
  const int error = errno;
  throw Error(ErrorKind::system, what + ": " + std::strerror(error) + cure(error));
}

std::uint64_t Signature::hash() const {
  std::uint64_t h = mix(count, counts_hash);
  h = mix(h, static_cast<std::uint32_t>(root));
  h = mix(h, static_cast<std::uint64_t>(collective) | static_cast<std::uint64_t>(dtype) << 8 |
                 static_cast<std::uint64_t>(op) << 16 | static_cast<std::uint64_t>(order) << 24);
  for (std::size_t i = 0; i < sizeof algorithm; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, algorithm + i, 8);
    if (word == 0) break;
    h = mix(h, word);
  }
  return h;
}

std::string Signature::describe() const {
  const auto c = static_cast<Collective>(collective);
  std::string s{name_of(c)};
  if (order & kUneven) s += "_v";
  if (c != Collective::barrier) {
    s += "(count=" + std::to_string(count) +
         ", dtype=" + std::string{name_of(static_cast<Dtype>(dtype))};
    if (reduces(c)) s += ", op=" + std::string{name_of(static_cast<Op>(op))};
    if (rooted(c)) s += ", root=" + std::to_string(root);
    if (counts_hash) {
      char digits[20];
      std::snprintf(digits, sizeof digits, "%08" PRIx64, counts_hash >> 32);
      s += std::string{", counts="} + digits;
    }
    if (algorithm[0]) s += std::string{", algorithm="} + algorithm;
    if (order & kOrder) s += ", order=rank";
    if (order & kInLines) s += ", in lines";
    if (order & kInFewBlocks) s += ", leaving room for computing";
    if (order & kByCopies) s += ", by copy engines, leaving room for computing";
    s += ")";
  }
  if (order & kOnDevice) s += " on arrays on the GPU";
  return s;
}

struct Region::Head {
  std::uint64_t cookie;
  std::uint64_t bytes;
  std::atomic<std::uint32_t> abort;
  std::atomic<std::uint64_t> tick_rate;
  char reason[kAbortReason];
};

bool can_read_process(int pid, std::uintptr_t address, std::uint64_t expected) {
  std::uint64_t seen = 0;
  const iovec local{&seen, sizeof seen}, remote{reinterpret_cast<void*>(address), sizeof seen};
  return process_vm_readv(pid, &local, 1, &remote, 1, 0) == sizeof seen && seen == expected;
}

std::uint64_t random_cookie() {
  std::uint64_t cookie = 0;
  if (getrandom(&cookie, sizeof cookie, 0) != sizeof cookie) system_failed("getrandom");
  return cookie;
}

int make_memfd(const char* name, std::size_t bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) system_failed("memfd_create");
  // The kernel makes it 0777. Who may look into /proc/PID/fd is asked first, and this as well.
  if (fchmod(fd, S_IRUSR | S_IWUSR) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    system_failed("cannot size a shared segment of " + std::to_string(bytes) + " bytes");
  }
  return fd;
}

std::string memfd_handle(int fd, std::uint64_t cookie) {
  struct stat status {};
  if (fstat(fd, &status) != 0) system_failed("fstat of a shared segment");
  char text[128];
  std::snprintf(text, sizeof text, "%d:%d:%" PRIu64 ":%" PRIu64, static_cast<int>(getpid()), fd,
                static_cast<std::uint64_t>(status.st_ino), cookie);
  return text;
}

int open_memfd(const std::string& handle, std::uint64_t* cookie) {
  int pid = 0, fd = -1;
  std::uint64_t inode = 0;
  if (std::sscanf(handle.c_str(), "%d:%d:%" SCNu64 ":%" SCNu64, &pid, &fd, &inode, cookie) != 4)
    throw Error(ErrorKind::system, "malformed segment handle '" + handle + "'");
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int mine = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (mine < 0)
    system_failed(
        "cannot open the shared segment of process " + std::to_string(pid) +
        " (another user's, or /proc shows other processes here? With mpirun, MPI carries the data "
        "of such ranks)");
  struct stat status {};
  if (fstat(mine, &status) != 0 || status.st_ino != inode) {
    close(mine);
    throw Error(ErrorKind::system,
                "process " + std::to_string(pid) +
                    " of this PID namespace is not the peer that was meant: the ranks do not "
                    "share a PID namespace; let their containers share one (--pid=host), or start "
                    "the job with mpirun, so that MPI carries the data");
  }
  return mine;
}

std::size_t Region::fifo_index(int src, int dst, int channel) const {
  return (static_cast<std::size_t>(src) * shape_.nranks + dst) * shape_.channels + channel;
}

Region::Region(const RegionShape& shape, void* base, int fd, std::uint64_t cookie)
    : shape_(shape), base_(static_cast<std::byte*>(base)), fd_(fd), cookie_(cookie) {
  const std::size_t n = shape.nranks;
  const std::size_t fifos = n * n * shape.channels;
  std::size_t at = pages(sizeof(Head));
  const auto take = [&at](std::size_t size) {
    const std::size_t here = at;
    at += pages(size);
    return here;
  };
  council_ = take(sizeof(CouncilTable));
  seats_ = take(n * sizeof(Seat));
  ranks_ = take(n * sizeof(RankArea));
  stages_ = take(n * shape.stage_depth * shape.stage_slot);
  results_ = take(n * shape.stage_depth * shape.stage_slot);
  fifo_controls_ = take(fifos * sizeof(FifoControl));
  fifo_headers_ = take(fifos * shape.fifo_depth * sizeof(FifoSlotHeader));
  fifo_data_ = take(fifos * shape.fifo_depth * shape.fifo_slot);
  pair_lengths_ = take(n * 2 * 2 * n * sizeof(std::uint64_t));
  bytes_ = at;
}

std::size_t Region::size_of(const RegionShape& shape) {
  return Region(shape, nullptr, -1, 0).bytes_;
}

Region::~Region() {
  if (base_ != nullptr) munmap(base_, bytes_);
  close_handle();
}

std::shared_ptr<Region> Region::make_private(const RegionShape& shape) {
  const std::size_t bytes = size_of(shape);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) system_failed("cannot map " + std::to_string(bytes) + " bytes");
  std::shared_ptr<Region> region(new Region(shape, base, -1, 0));
  return region;
}

std::shared_ptr<Region> Region::make_shared(const RegionShape& shape) {
  const std::size_t bytes = size_of(shape);
  const int fd = make_memfd("collectives", bytes);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    close(fd);
    system_failed("cannot map a shared segment of " + std::to_string(bytes) + " bytes");
  }
  std::shared_ptr<Region> region(new Region(shape, base, fd, random_cookie()));
  region->head().cookie = region->cookie_;
  region->head().bytes = bytes;
  return region;
}

std::shared_ptr<Region> Region::open(const RegionShape& shape, const std::string& handle) {
  const std::size_t bytes = size_of(shape);
  std::uint64_t cookie = 0;
  const int fd = open_memfd(handle, &cookie);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  if (base == MAP_FAILED)
    system_failed("cannot map a peer's shared segment of " + std::to_string(bytes) + " bytes");
  std::shared_ptr<Region> region(new Region(shape, base, -1, cookie));
  if (region->head().cookie != cookie || region->head().bytes != bytes)
    throw Error(ErrorKind::system,
                "the shared segment opened is not the peer's: its cookie or size differs");
  return region;
}

std::string Region::handle() const { return memfd_handle(fd_, cookie_); }

void Region::close_handle() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Region::Head& Region::head() { return *reinterpret_cast<Head*>(base_); }
std::atomic<std::uint32_t>& Region::abort_word() { return head().abort; }
std::atomic<std::uint64_t>& Region::tick_rate() { return head().tick_rate; }
char* Region::abort_reason() { return head().reason; }
bool Region::gave_up() {
  const std::uint32_t word = abort_word().load(std::memory_order_acquire);
  return word != 0 && (word & kUnfinished) == 0;
}

CouncilTable& Region::council() { return *reinterpret_cast<CouncilTable*>(base_ + council_); }
Seat& Region::seat(int r) { return reinterpret_cast<Seat*>(base_ + seats_)[r]; }

RankArea& Region::rank(int r) { return reinterpret_cast<RankArea*>(base_ + ranks_)[r]; }

std::uint64_t* Region::pair_lengths(int r, std::uint64_t sequence) {
  const std::size_t n = shape_.nranks;
  return reinterpret_cast<std::uint64_t*>(base_ + pair_lengths_) +
         (static_cast<std::size_t>(r) * 2 + (sequence & 1)) * 2 * n;
}

std::byte* Region::stage(int r, std::uint64_t slot) {
  return base_ + stages_ +
         (static_cast<std::size_t>(r) * shape_.stage_depth + slot % shape_.stage_depth) *
             shape_.stage_slot;
}

std::byte* Region::result(int r, std::uint64_t slot) {
  return base_ + results_ +
         (static_cast<std::size_t>(r) * shape_.stage_depth + slot % shape_.stage_depth) *
             shape_.stage_slot;
}

FifoControl& Region::fifo_control(int src, int dst, int channel) {
  return reinterpret_cast<FifoControl*>(base_ + fifo_controls_)[fifo_index(src, dst, channel)];
}

FifoSlotHeader& Region::fifo_header(int src, int dst, int channel, std::uint64_t slot) {
  return reinterpret_cast<FifoSlotHeader*>(
      base_ +
      fifo_headers_)[fifo_index(src, dst, channel) * shape_.fifo_depth + slot % shape_.fifo_depth];
}

std::byte* Region::fifo_data(int src, int dst, int channel, std::uint64_t slot) {
  return base_ + fifo_data_ +
         (fifo_index(src, dst, channel) * shape_.fifo_depth + slot % shape_.fifo_depth) *
             shape_.fifo_slot;
}

}  // namespace collectives
