// Where flight recorders are written to, and the signal that asks for it.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "errors.hpp"
#include "recorder.hpp"
#include "threads.hpp"

namespace collectives {
namespace {

std::mutex directory_mutex;
std::string& directory() {
  static auto* const one = new std::string;
  return *one;
}

bool write_all(int fd, const std::string& text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const ssize_t n = write(fd, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<std::size_t>(n);
  }
  return true;
}

// What the handler reads: set before it is installed. A child that forked off has the handler but
// not the thread, and must not wake its parent's.
std::atomic<int> pipe_out{-1};
std::atomic<int> listening_process{0};

void on_signal(int) {
  const int saved = errno;
  if (getpid() == listening_process.load(std::memory_order_relaxed)) {
    const char byte = 1;
    // A full pipe means that a dump is on its way already.
    [[maybe_unused]] const ssize_t n = write(pipe_out.load(std::memory_order_relaxed), &byte, 1);
  }
  errno = saved;
}

void listen_to(int in) {
  for (;;) {
    char bytes[64];
    const ssize_t n = read(in, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    dump_process("a signal asked for it");
  }
}

}  // namespace

void set_dump_directory(const std::string& where) {
  const std::lock_guard lock(directory_mutex);
  directory() = where;
}

std::string dump_process(const std::string& reason) noexcept {
  try {
    // One at a time: ranks that are threads write the same file.
    const std::lock_guard lock(directory_mutex);
    if (directory().empty()) return "";
    char host[256] = {};
    gethostname(host, sizeof host - 1);
    const std::string path = directory() + "/collectives-" + host + "-" + std::to_string(getpid());
    const std::string before = path + ".part", after = path + ".json";
    // Written beside and renamed: whoever looks finds a whole file. A link that somebody has put
    // there is not followed.
    unlink(before.c_str());
    const int fd = open(before.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return "";
    const bool whole = write_all(fd, Recorder::process_json(reason));
    if (close(fd) != 0 || !whole || rename(before.c_str(), after.c_str()) != 0) {
      unlink(before.c_str());
      return "";
    }
    return after;
  } catch (const std::exception&) {
    return "";
  }
}

void dump_on_signal(int number) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (listening_process.load() != getpid()) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0 || fcntl(ends[1], F_SETFL, O_NONBLOCK) != 0)
      throw Error(ErrorKind::system, std::string{"no pipe for signals: "} + strerror(errno));
    start_thread(listen_to, ends[0]).detach();
    pipe_out = ends[1];
    listening_process = getpid();
  }
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  if (sigaction(number, &action, nullptr) != 0)
    throw Error(ErrorKind::invalid,
                "signal " + std::to_string(number) + " cannot be caught: " + strerror(errno));
}

}  // namespace collectives
