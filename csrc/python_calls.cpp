#include "python_calls.hpp"

#include <unistd.h>

#include <cstring>
#include <new>
#include <stdexcept>

#include "errors.hpp"
#include "schedule.hpp"

namespace collectives {
namespace {

constexpr const char* kCapsule = "collectives.caller";

// ---- errors -----------------------------------------------------------------------------------

const char* python_class(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::mismatch:
      return "MismatchError";
    case ErrorKind::deadline:
      return "DeadlineError";
    case ErrorKind::peer_died:
      return "PeerDiedError";
    case ErrorKind::aborted:
      return "AbortedError";
    case ErrorKind::closed:
      return "ClosedError";
    case ErrorKind::unsupported:
      return "UnsupportedError";
    case ErrorKind::invalid:
    case ErrorKind::system:
      break;
  }
  return "CollectiveError";
}

void set_named_error(const char* name, const char* text, int peer = -1) {
  PyObject* module = PyImport_ImportModule("collectives.errors");
  PyObject* type = module != nullptr ? PyObject_GetAttrString(module, name) : nullptr;
  PyObject* error = type != nullptr ? PyObject_CallFunction(type, "s", text) : nullptr;
  if (error != nullptr && peer >= 0) {
    PyObject* number = PyLong_FromLong(peer);
    if (number != nullptr) PyObject_SetAttrString(error, "peer", number);
    Py_XDECREF(number);
  }
  if (error != nullptr) PyErr_SetObject(type, error);
  Py_XDECREF(error);
  Py_XDECREF(type);
  Py_XDECREF(module);
}

}  // namespace

void set_error_from_exception() noexcept {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (const Error& error) {
    set_named_error(python_class(error.kind()), error.what(), error.peer());
  } catch (const ScheduleError& error) {
    set_named_error("ScheduleError", error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

namespace {

// ---- the GIL during waits ---------------------------------------------------------------------

void* give_up_gil() { return PyGILState_Check() ? PyEval_SaveThread() : nullptr; }
// While the interpreter ends, it does not give the GIL to daemon threads but ends them: by a forced
// unwinding, which no destructor survives. So they stay here until the process has ended.
void restore_thread(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    for (;;) pause();
  }
}
void take_back_gil(void* state) {
  if (state != nullptr) restore_thread(static_cast<PyThreadState*>(state));
}
// Ctrl-C and other signals end a wait: their handler's exception is thrown through the engine.
void look_at_signals(void*& state) {
  if (state == nullptr) return;
  restore_thread(static_cast<PyThreadState*>(state));
  state = nullptr;
  if (PyErr_CheckSignals() != 0) throw PythonError();
  state = PyEval_SaveThread();
}

}  // namespace

WithoutGil::~WithoutGil() { restore_thread(state_); }

namespace {

// ---- calls ------------------------------------------------------------------------------------

// Data above this are moved without the GIL: the time to give it up (about 0.1 us) no longer shows.
// A call claims the communicator before that, so that two threads never work on it at once.
constexpr std::size_t kHoldGilBelow = 32 << 10;

// What the functions of one communicator are bound to.
struct Caller {
  std::shared_ptr<Communicator> comm;
  // all_reduce(x) with defaults: which algorithm serves up to how many bytes.
  std::vector<std::pair<std::uint64_t, int>> all_reduce_choice;
  WrapWork wrap_work = nullptr;
};

Caller& caller_of(PyObject* self) {
  return *static_cast<Caller*>(PyCapsule_GetPointer(self, kCapsule));
}

void run_call(Caller& caller, const Call& call, const Communicator::Options& options,
              std::size_t bytes) {
  caller.comm->run(call, options, bytes >= kHoldGilBelow || caller.comm->config().threads);
}

// The dtype of a struct-module format of one native element, or -1.
int dtype_of_format(const char* format) {
  if (format == nullptr) return static_cast<int>(Dtype::uint8);
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (format[0] == 'Z' && format[1] != 0 && format[2] == 0)
    return format[1] == 'f'   ? static_cast<int>(Dtype::complex64)
           : format[1] == 'd' ? static_cast<int>(Dtype::complex128)
                              : -1;
  if (format[0] == 0 || format[1] != 0) return -1;
  switch (format[0]) {
    case 'e':
      return static_cast<int>(Dtype::float16);
    case 'f':
      return static_cast<int>(Dtype::float32);
    case 'd':
      return static_cast<int>(Dtype::float64);
    case 'b':
      return static_cast<int>(Dtype::int8);
    case 'h':
      return static_cast<int>(Dtype::int16);
    case 'i':
      return static_cast<int>(Dtype::int32);
    case 'l':
    case 'q':
      return static_cast<int>(Dtype::int64);
    case 'B':
      return static_cast<int>(Dtype::uint8);
    case 'H':
      return static_cast<int>(Dtype::uint16);
    case 'I':
      return static_cast<int>(Dtype::uint32);
    case 'L':
    case 'Q':
      return static_cast<int>(Dtype::uint64);
    case '?':
      return static_cast<int>(Dtype::boolean);
    default:
      return -1;
  }
}

// numpy's, for good; nullptr: there is none. (Not made by a static's initialiser, whose lock a
// thread would hold while an import lets another have the GIL.)
PyTypeObject* ndarray() {
  static PyObject* type = nullptr;
  if (type == nullptr) {
    PyObject* const numpy = PyImport_ImportModule("numpy");
    type = numpy != nullptr ? PyObject_GetAttrString(numpy, "ndarray") : nullptr;
    Py_XDECREF(numpy);
    PyErr_Clear();
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

// A plain contiguous buffer of a native dtype.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() {
    if (held_) PyBuffer_Release(&view);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // False, without a Python error, if `x` is none, or may mean more by its elements than they are,
  // as a masked array does.
  bool get(PyObject* x, int flags) {
    PyTypeObject* const array = ndarray();
    if (array == nullptr || (Py_TYPE(x) != array && PyObject_TypeCheck(x, array))) return false;
    if (PyObject_GetBuffer(x, &view, flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      return false;
    }
    held_ = true;
    const int number = dtype_of_format(view.format);
    if (number < 0) return false;
    dtype = static_cast<Dtype>(number);
    return size_of(dtype) == static_cast<std::size_t>(view.itemsize);
  }
  std::byte* data() const { return static_cast<std::byte*>(view.buf); }

  Py_buffer view;
  Dtype dtype = Dtype::uint8;

 private:
  bool held_ = false;
};

// sum(x[, out]) -> bool: sums x over the ranks, into itself or into out, with the default
// algorithm, if the arrays are plain buffers of one dtype and length; False (nothing done) for
// anything else, which the general path then judges.
PyObject* fast_sum(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Caller& caller = caller_of(self);
  if (nargs < 1 || nargs > 2 || caller.all_reduce_choice.empty()) Py_RETURN_FALSE;
  Buffer x, out;
  if (!x.get(args[0], nargs == 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) Py_RETURN_FALSE;
  Call call;
  call.dtype = x.dtype;
  call.input = call.output = x.data();
  const auto bytes = static_cast<std::uint64_t>(x.view.len);
  if (nargs == 2) {
    if (!out.get(args[1], PyBUF_WRITABLE) || out.dtype != x.dtype || out.view.len != x.view.len)
      Py_RETURN_FALSE;
    call.output = out.data();
    const bool apart = call.output + bytes <= call.input || call.input + bytes <= call.output;
    if (!apart && call.input != call.output) Py_RETURN_FALSE;
  }
  call.count = bytes / size_of(x.dtype);
  Communicator::Options options;
  for (const auto& [limit, algorithm] : caller.all_reduce_choice) {
    options.algorithm = algorithm;
    if (bytes <= limit) break;
  }
  try {
    run_call(caller, call, options, bytes);
  } catch (...) {
    // Messages may still leave from them, so they stay for good.
    if (caller.comm->lends())
      for (Py_ssize_t i = 0; i < nargs; ++i) Py_INCREF(args[i]);
    set_error_from_exception();
    return nullptr;
  }
  Py_RETURN_TRUE;
}

// None -> no blocks; int -> equal blocks; (total,) -> split; [lengths] or ([lengths], [offsets]).
Blocks to_blocks(PyObject* o, int n) {
  if (o == Py_None) return Blocks();
  if (PyLong_Check(o)) return Blocks::equal(PyLong_AsUnsignedLongLong(o));
  const auto numbers = [](PyObject* list) {
    std::vector<std::uint64_t> v;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i)
      v.push_back(PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, i)));
    return v;
  };
  if (PyList_Check(o)) return Blocks::table(numbers(o));
  if (PyTuple_Check(o) && PyTuple_GET_SIZE(o) == 1)
    return Blocks::split(PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(o, 0)), n);
  return Blocks::table(numbers(PyTuple_GET_ITEM(o, 0)), numbers(PyTuple_GET_ITEM(o, 1)));
}

}  // namespace

bool parse_call(PyObject* const* args, Py_ssize_t nargs, int nranks, Call* call,
                Communicator::Options* options) {
  if (nargs != 13) {
    PyErr_Format(PyExc_TypeError, "a call takes 13 arguments, not %zd", nargs);
    return false;
  }
  call->collective = static_cast<Collective>(PyLong_AsLong(args[0]));
  call->dtype = static_cast<Dtype>(PyLong_AsLong(args[1]));
  call->op = static_cast<Op>(PyLong_AsLong(args[2]));
  call->root = static_cast<int>(PyLong_AsLong(args[3]));
  call->input = reinterpret_cast<const std::byte*>(PyLong_AsUnsignedLongLong(args[4]));
  call->output = reinterpret_cast<std::byte*>(PyLong_AsUnsignedLongLong(args[5]));
  call->count = PyLong_AsUnsignedLongLong(args[6]);
  call->in = to_blocks(args[7], nranks);
  call->out = to_blocks(args[8], nranks);
  options->algorithm = static_cast<int>(PyLong_AsLong(args[9]));
  options->order = static_cast<Order>(PyLong_AsLong(args[10]));
  options->factor[0] = PyFloat_AsDouble(args[11]);
  options->factor[1] = PyFloat_AsDouble(args[12]);
  return PyErr_Occurred() == nullptr;
}

namespace {

PyObject* fast_call(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Caller& caller = caller_of(self);
  try {
    Call call;
    Communicator::Options options;
    if (!parse_call(args, nargs, caller.comm->size(), &call, &options)) return nullptr;
    const std::uint64_t elements =
        call.count + call.in.total(caller.comm->size()) + call.out.total(caller.comm->size());
    run_call(caller, call, options, elements * size_of(call.dtype));
  } catch (...) {
    set_error_from_exception();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* fast_submit(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Caller& caller = caller_of(self);
  try {
    Call call;
    Communicator::Options options;
    if (!parse_call(args, nargs, caller.comm->size(), &call, &options)) return nullptr;
    return caller.wrap_work(caller.comm->submit(std::move(call), options));
  } catch (...) {
    set_error_from_exception();
    return nullptr;
  }
}

PyMethodDef caller_methods[] = {
    {"sum", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fast_sum)), METH_FASTCALL,
     "Sums plain buffers over the ranks; False if they are none."},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fast_call)), METH_FASTCALL,
     "Runs a call."},
    {"submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fast_submit)),
     METH_FASTCALL, "Queues a call."},
};

void delete_caller(PyObject* capsule) { delete &caller_of(capsule); }

}  // namespace

void install_wait_hooks() {
  Communicator::on_enter_slow = give_up_gil;
  Communicator::on_leave_slow = take_back_gil;
  Communicator::on_tick = look_at_signals;
}

std::vector<PyObject*> make_call_functions(
    std::shared_ptr<Communicator> comm,
    std::vector<std::pair<std::uint64_t, int>> all_reduce_choice, WrapWork wrap_work) {
  auto* caller = new Caller{std::move(comm), std::move(all_reduce_choice), wrap_work};
  PyObject* capsule = PyCapsule_New(caller, kCapsule, delete_caller);
  if (capsule == nullptr) {
    delete caller;
    throw PythonError();
  }
  std::vector<PyObject*> functions;
  for (PyMethodDef& method : caller_methods) functions.push_back(PyCFunction_New(&method, capsule));
  Py_DECREF(capsule);  // the functions hold it
  for (PyObject* f : functions)
    if (f == nullptr) throw PythonError();
  return functions;
}

}  // namespace collectives
