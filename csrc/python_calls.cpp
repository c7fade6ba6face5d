#include <unistd.h>

#include <new>
#include <stdexcept>

#include "errors.hpp"
#include "python_caller.hpp"
#include "schedule.hpp"

namespace collectives {
namespace {

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

std::vector<std::uint64_t> numbers(PyObject* list) {
  std::vector<std::uint64_t> v;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i)
    v.push_back(PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, i)));
  return v;
}

// None -> no blocks; int -> equal blocks; (total,) -> split; [lengths] or ([lengths], [offsets]).
Blocks to_blocks(PyObject* o, int n) {
  if (o == Py_None) return Blocks();
  if (PyLong_Check(o)) return Blocks::equal(PyLong_AsUnsignedLongLong(o));
  if (PyList_Check(o)) return Blocks::table(numbers(o));
  if (PyTuple_Check(o) && PyTuple_GET_SIZE(o) == 1)
    return Blocks::split(PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(o, 0)), n);
  return Blocks::table(numbers(PyTuple_GET_ITEM(o, 0)), numbers(PyTuple_GET_ITEM(o, 1)));
}

}  // namespace

bool parse_call(PyObject* const* args, Py_ssize_t nargs, int nranks, Call* call,
                Communicator::Options* options) {
  if (nargs != 13 && nargs != 14) {
    PyErr_Format(PyExc_TypeError, "a call takes 13 or 14 arguments, not %zd", nargs);
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
  if (nargs == 14) options->parts = hash_of(numbers(args[13]));
  return PyErr_Occurred() == nullptr;
}

namespace {

PyObject* fast_call(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Caller& caller = Caller::of(self);
  try {
    Call call;
    Communicator::Options options;
    if (!parse_call(args, nargs, caller.comm->size(), &call, &options)) return nullptr;
    const std::uint64_t elements =
        call.count + call.in.total(caller.comm->size()) + call.out.total(caller.comm->size());
    caller.run(call, options, elements * size_of(call.dtype));
  } catch (...) {
    set_error_from_exception();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* fast_submit(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Caller& caller = Caller::of(self);
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

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
constexpr PyMethodDef method(const char* name, const char* what) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, what};
}

PyMethodDef caller_methods[] = {
    method<plain_sum>("sum", "Sums plain buffers over the ranks; False if they are none."),
    method<plain_call>("plain", "Makes a call on plain arrays; False if they are none."),
    method<plain_transfer>("transfer", "Sends or receives a plain array; False if it is none."),
    method<learn_choice>("choose", "Says which algorithms serve a collective."),
    method<fast_call>("call", "Runs a call."),
    method<fast_submit>("submit", "Queues a call."),
};

void delete_caller(PyObject* capsule) { delete &Caller::of(capsule); }

}  // namespace

void install_wait_hooks() {
  Communicator::on_enter_slow = give_up_gil;
  Communicator::on_leave_slow = take_back_gil;
  Communicator::on_tick = look_at_signals;
}

std::vector<PyObject*> make_call_functions(std::shared_ptr<Communicator> comm, WrapWork wrap_work) {
  auto* caller = new Caller{std::move(comm), {}, wrap_work};
  PyObject* capsule = PyCapsule_New(caller, Caller::kCapsule, delete_caller);
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
