// The calls as plain CPython functions, and what every crossing between the core and Python needs:
// errors, the GIL, signals.
//
// No pybind11 here: a 4-byte all_reduce takes less time than pybind11 needs to look at its
// arguments.
#pragma once

#include <Python.h>

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "communicator.hpp"
#include "device.hpp"
#include "errors.hpp"

namespace collectives {

// Python's error indicator is set; thrown through the core, which knows nothing of Python.
struct PythonError : std::exception {
  const char* what() const noexcept override {
    return "a Python exception (a signal handler raised)";
  }
};

// Sets Python's error indicator from the C++ exception in flight. Call in a catch block, with the
// GIL.
void set_error_from_exception() noexcept;

// While it lives, the thread is without the GIL, which it had. Unlike pybind11's own it is safe in
// daemon threads at the end of the interpreter.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Makes waits give up the GIL while they are slow, and look at signals.
void install_wait_hooks();

// (collective, dtype, op, root, in, out, count, in_blocks, out_blocks, algorithm, order, re, im):
// numbers throughout. Blocks: None, int (equal), (total,) (split), [lengths] or ([lengths],
// [offsets]). One more, [counts], is for calls that were packed into this one. False with the error
// indicator set if malformed.
bool parse_call(PyObject* const* args, Py_ssize_t nargs, int nranks, Call* call,
                Communicator::Options* options);

// New references to the functions sum, plain, transfer, choose, call and submit, bound to `comm`:
// `caller` in _core.pyi says what they do.
//   wrap_work   gives the Python object of a Work
// Throws PythonError.
using WrapWork = PyObject* (*)(std::shared_ptr<Work>);
std::vector<PyObject*> make_call_functions(std::shared_ptr<Communicator> comm, WrapWork wrap_work);

// What a call raises on this rank the peers hear, who come to it or wait in one: but for what all
// find themselves, and before which nothing was done.
void tell_peers(DeviceCommunicator& device, const Error& error);

// Does `put`, which puts work on a stream. Without the GIL: a launch can wait for room in the
// stream's queue, and so for another thread's rank.
template <class Put>
void put_on_gpu(DeviceCommunicator& device, const Put& put) {
  WithoutGil release;
  try {
    put();
  } catch (const Error& error) {
    tell_peers(device, error);
    throw;
  }
}

// New references. How a call on device arrays is done, as an object that the function below takes:
// make it once.
PyObject* make_device_options(DeviceOptions options);
// call(options, stream, ...), with the 13 numbers of parse_call, on the GPU. Throws PythonError.
PyObject* make_device_call(std::shared_ptr<Communicator> comm,
                           std::shared_ptr<DeviceCommunicator> device);
// New references to the functions call, learn and kept of known_calls.py, for arrays on GPU
// `ordinal`.
//   kinds        the kinds of arrays by their types: `array.recognising.KINDS`
//   stream_type  `array.Stream`
//   most         calls that are kept
// Throws PythonError.
std::vector<PyObject*> make_known_calls(std::shared_ptr<Communicator> comm,
                                        std::shared_ptr<DeviceCommunicator> device, int ordinal,
                                        PyObject* kinds, PyObject* stream_type, std::size_t most);

}  // namespace collectives
