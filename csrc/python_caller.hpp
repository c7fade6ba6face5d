// What the plain CPython functions of one communicator have in common.
#pragma once

#include <Python.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "python_calls.hpp"
#include "types.hpp"

namespace collectives {

// What the functions are bound to.
struct Caller {
  // Data above this are moved without the GIL: the time to give it up (about 0.1 us) no longer
  // shows. A call claims the communicator before that, so that two threads never work on it at
  // once.
  static constexpr std::size_t kHoldGilBelow = 32 << 10;
  static constexpr const char* kCapsule = "collectives.caller";
  static Caller& of(PyObject* self) {
    return *static_cast<Caller*>(PyCapsule_GetPointer(self, kCapsule));
  }

  void run(const Call& call, const Communicator::Options& options, std::size_t bytes) {
    comm->run(call, options, bytes >= kHoldGilBelow || comm->config().threads);
  }

  std::shared_ptr<Communicator> comm;
  // Which algorithm serves up to how many bytes, by collective; none yet: the general path knows.
  std::vector<std::pair<std::uint64_t, int>> choices[kCollectiveCount];
  WrapWork wrap_work = nullptr;
};

// METH_FASTCALL functions.

// sum(x[, out]) -> bool: sums x over the ranks, into itself or into out, with the default
// algorithm, if the arrays are plain buffers of one dtype and length; False (nothing done) for
// anything else, which the general path then judges.
PyObject* plain_sum(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
// plain(collective, x, out, op, root, algorithm) -> bool: the same for any collective on arrays of
// numpy, None where there is none, and by a number of an algorithm, None: by what its size chooses.
PyObject* plain_call(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
// transfer(sends, x, peer, tag) -> bool: the same for a message.
PyObject* plain_transfer(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
// choose(collective, [(limit in bytes, number of the algorithm)]), by rising limit.
PyObject* learn_choice(PyObject* self, PyObject* const* args, Py_ssize_t nargs);

}  // namespace collectives
