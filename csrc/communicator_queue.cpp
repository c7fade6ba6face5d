// Asynchronous calls: their queue and its thread, the thread that moves sends and receives, and the
// Work that callers wait for.
#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "busy.hpp"
#include "communicator.hpp"
#include "errors.hpp"
#include "threads.hpp"

namespace collectives {
namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

double steady_seconds() { return duration<double>(steady_clock::now().time_since_epoch()).count(); }

}  // namespace

// ---- work -------------------------------------------------------------------------------------

bool Work::done() const {
  check_process();
  std::lock_guard lock(mutex_);
  return done_;
}

bool Work::wait(double seconds) {
  check_process();
  std::unique_lock lock(mutex_);
  if (seconds < 0) {
    changed_.wait(lock, [this] { return done_; });
    return true;
  }
  return changed_.wait_for(lock, duration<double>(seconds), [this] { return done_; });
}

std::exception_ptr Work::error() const {
  check_process();
  std::lock_guard lock(mutex_);
  return error_;
}

// The thread that would finish it is in another process.
void Work::check_process() const {
  if (birth_.in_child())
    throw Error(ErrorKind::closed,
                "this process was forked while the call was under way, which ends in the parent");
}

std::pair<double, double> Work::span() const {
  std::lock_guard lock(mutex_);
  return {began_, ended_};
}

void Work::begin() {
  std::lock_guard lock(mutex_);
  began_ = steady_seconds();
}

void Work::finish(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  done_ = true;
  ended_ = steady_seconds();
  error_ = std::move(error);
  changed_.notify_all();
}

// ---- the queue ---------------------------------------------------------------------------------

std::shared_ptr<Work> Communicator::submit(Call call, Options options) {
  check_open();
  ++issued_;
  auto work = make_for_this_process<Work>();
  enqueue({std::move(call), options, work, nullptr});
  return work;
}

void Communicator::submit(std::shared_ptr<Task> task) {
  check_open();
  ++issued_;
  enqueue({{}, {}, make_for_this_process<Work>(), std::move(task)});
}

void Communicator::enqueue(Job job) {
  std::lock_guard lock(queue_mutex_);
  // First, since this may throw: a call that is refused must not run later.
  if (!thread_.joinable()) thread_ = start_thread([this] { worker(); });
  queue_.push_back(std::move(job));
  queued_.fetch_add(1, std::memory_order_relaxed);
  queue_changed_.notify_all();
}

bool Communicator::drain(double seconds) {
  birth_.check();  // a forked child has no seat of its own
  if (told_to_stop()) give_up(ErrorKind::aborted, config_.region->abort_reason());
  const auto end = steady_clock::now() + duration<double>(seconds);
  while (queued_.load(std::memory_order_acquire) != 0) {
    if (steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

void Communicator::worker() {
  std::unique_lock lock(queue_mutex_);
  for (;;) {
    if (queue_.empty()) {
      if (stop_) return;
      queue_changed_.wait(lock);
      continue;
    }
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    job.work->begin();
    try {
      // Behind a call that failed the ranks are out of step: what is queued must not run.
      if (broken_)
        throw Error(ErrorKind::aborted,
                    "a call before this one in the queue failed: " + broken_reason());
      look("began a call");
      Busy busy(busy_);
      if (job.task)
        job.task->run(*this);
      else
        execute(job.call, job.options);
    } catch (...) {
      error = std::current_exception();
    }
    if (job.task) {
      if (error) leave_after(error);
      job.task->end(error);
    }
    queued_.fetch_sub(1, std::memory_order_release);
    ended_.fetch_add(1, std::memory_order_release);
    job.work->finish(error);
    lock.lock();
  }
}

// A task may end between its calls, where peers wait for the next. (What a call of it found before
// any data moved leaves the ranks in step.)
void Communicator::leave_after(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::mismatch && e.kind() != ErrorKind::unsupported)
      leave_path(e.kind(), e.what());
  } catch (const std::exception& e) {
    leave_path(ErrorKind::aborted, e.what());
  }
}

// Before a transfer is posted that nobody may wait for, since this may throw.
void Communicator::start_transfer_worker() {
  std::lock_guard lock(queue_mutex_);
  if (!transfer_thread_.joinable()) transfer_thread_ = start_thread([this] { transfer_worker(); });
}

void Communicator::wake_transfer_worker() {
  std::lock_guard lock(queue_mutex_);
  background_p2p_ = true;
  queue_changed_.notify_all();
}

// Moves sends and receives that nobody waits for.
void Communicator::transfer_worker() {
  using std::chrono::microseconds;
  constexpr microseconds kFirstNap{50}, kLongestNap{1000};
  microseconds nap = kFirstNap;
  std::unique_lock lock(queue_mutex_);
  while (!stop_) {
    if (!background_p2p_) {
      queue_changed_.wait(lock);
      nap = kFirstNap;
      continue;
    }
    lock.unlock();
    bool moved = false;
    try {
      moved = p2p_->progress();
    } catch (const Error& error) {  // whoever waits for a transfer is told by check_peers()
      leave_path(error.kind(), error.what());
    } catch (const std::exception& error) {
      leave_path(ErrorKind::aborted, error.what());
    }
    lock.lock();
    if (moved) {
      nap = kFirstNap;
    } else if (broken_ || p2p_->idle()) {
      background_p2p_ = false;
    } else if (!stop_) {
      const bool rung = queue_changed_.wait_for(lock, nap) == std::cv_status::no_timeout;
      nap = rung ? kFirstNap : std::min(nap * 2, kLongestNap);
    }
  }
}

}  // namespace collectives
