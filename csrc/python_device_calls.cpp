// Calls on device arrays as plain CPython functions, and the short way of those that are like one
// before: what a launch takes, 3 to 4 us, is most of the time of a call by it.
#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "errors.hpp"
#include "python_calls.hpp"

namespace collectives {
namespace {

constexpr const char* kOptions = "collectives.device_options";
constexpr const char* kDeviceCaller = "collectives.device_caller";
constexpr const char* kKnownCalls = "collectives.known_calls";

// An object of C++ in a capsule, which owns it.
template <class T>
PyObject* enclose(T* object, const char* name) {
  const auto end = [](PyObject* capsule) {
    delete static_cast<T*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
  };
  PyObject* capsule = PyCapsule_New(object, name, end);
  if (capsule != nullptr) return capsule;
  delete object;
  throw PythonError();
}

const DeviceOptions* options_of(PyObject* capsule) {
  return static_cast<const DeviceOptions*>(PyCapsule_GetPointer(capsule, kOptions));
}

struct DeviceCaller {
  std::shared_ptr<Communicator> comm;
  std::shared_ptr<DeviceCommunicator> device;

  void put(const Call& call, const DeviceOptions& options, std::uintptr_t stream) const {
    put_on_gpu(*device, [&] {
      comm->enter_device_call();
      device->run(call, options, stream);
    });
  }
};

PyObject* device_call(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  constexpr int kBefore = 2;
  const auto& caller = *static_cast<DeviceCaller*>(PyCapsule_GetPointer(self, kDeviceCaller));
  const DeviceOptions* const how = nargs < kBefore ? nullptr : options_of(args[0]);
  if (how == nullptr) {
    if (PyErr_Occurred() == nullptr)
      PyErr_SetString(PyExc_TypeError, "call(options, stream, ...) takes 15 arguments");
    return nullptr;
  }
  try {
    const std::uintptr_t stream = PyLong_AsUnsignedLongLong(args[1]);
    Call call;
    Communicator::Options numbers;
    if (!parse_call(args + kBefore, nargs - kBefore, caller.comm->size(), &call, &numbers))
      return nullptr;
    DeviceOptions options = *how;
    options.order = numbers.order;
    options.factor[0] = numbers.factor[0];
    options.factor[1] = numbers.factor[1];
    caller.put(call, options, stream);
  } catch (...) {
    set_error_from_exception();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef device_call_method = {
    "call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(device_call)), METH_FASTCALL,
    "Puts a call on a stream."};

// ---- calls like ones before --------------------------------------------------------------------

// A reference of its own.
class Owned {
 public:
  explicit Owned(PyObject* stolen = nullptr) : object_(stolen) {}
  ~Owned() { Py_XDECREF(object_); }
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  static Owned share(PyObject* borrowed) {
    Py_INCREF(borrowed);
    return Owned(borrowed);
  }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Throws PythonError where an expression has left one.
PyObject* must(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return object;
}

struct Names {
  PyObject* data = PyUnicode_InternFromString("data");
  PyObject* ptr = PyUnicode_InternFromString("ptr");
  PyObject* size = PyUnicode_InternFromString("size");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* device_id = PyUnicode_InternFromString("device_id");
  PyObject* flags = PyUnicode_InternFromString("flags");
  PyObject* c_contiguous = PyUnicode_InternFromString("c_contiguous");
  PyObject* plain = PyUnicode_InternFromString("plain");
  PyObject* glance = PyUnicode_InternFromString("glance");
  PyObject* current_stream = PyUnicode_InternFromString("current_stream");
  PyObject* has_written = PyUnicode_InternFromString("has_written");
};

const Names& names() {
  static const Names made;
  return made;
}

Owned attribute(PyObject* of, PyObject* name) { return Owned(must(PyObject_GetAttr(of, name))); }

unsigned long long number(PyObject* object) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr)
    throw PythonError();
  return value;
}

std::int64_t whole_number(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}

bool is_true(PyObject* object) {
  const int answer = PyObject_IsTrue(object);
  if (answer < 0) throw PythonError();
  return answer != 0;
}

// What a key says beside what identifies a call to the user: all that the general path looked at
// but the addresses.
struct Key {
  Owned dtype;  // of the array's library
  std::uint64_t size = 0;
  std::int64_t written = -1;  // elements of the other array; -1: there is none
  bool beside = false;
  Owned how;

  // Of all but `how`, whose hash the caller has.
  std::uint64_t hash(std::uint64_t of_how) const {
    std::uint64_t h = of_how;
    for (const std::uint64_t word :
         {reinterpret_cast<std::uintptr_t>(dtype.get()), size, static_cast<std::uint64_t>(written),
          static_cast<std::uint64_t>(beside)})
      h = (h ^ word) * 0xff51afd7ed558ccdULL + (h >> 29);
    return h;
  }
};

struct KnownCall {
  Key key;
  Call call;
  DeviceOptions options;
  std::int64_t gap = 0;             // from input to output, which may overlap then alone
  std::int64_t nbytes[2] = {0, 0};  // of both
};

// What an array's type says. plain: see Kind in array/kind.py.
struct Kind {
  PyObject* kind = nullptr;
  bool plain = false;
};

// An array, as it looks at a glance.
struct Glance {
  std::uintptr_t pointer = 0;
  std::uint64_t size = 0;
  Owned dtype;
  std::int64_t ordinal = 0;
};

class KnownCalls {
 public:
  KnownCalls(DeviceCaller caller, int device, PyObject* kinds, PyObject* stream_type,
             std::size_t most)
      : caller_(std::move(caller)),
        device_(device),
        kinds_(Owned::share(kinds)),
        stream_type_(Owned::share(stream_type)),
        most_(most) {}

  // New references: (), None, or the key to learn the call by. See known_calls.py.
  PyObject* call(PyObject* x, PyObject* out, PyObject* stream, PyObject* how, bool writes) {
    const Kind kind = kind_of(x);
    Glance mine;
    if (kind.kind == nullptr || !glance(kind, x, &mine)) Py_RETURN_NONE;
    Key key;
    std::uintptr_t handle = 0;
    if (Py_TYPE(stream) == reinterpret_cast<PyTypeObject*>(stream_type_.get())) {
      PyObject* const ordinal = PyTuple_GET_ITEM(stream, 1);
      if (ordinal == Py_None || whole_number(ordinal) != mine.ordinal) Py_RETURN_NONE;
      handle = number(PyTuple_GET_ITEM(stream, 0));
      key.beside = is_true(PyTuple_GET_ITEM(stream, 2));
    } else if (stream == Py_None) {
      const Owned ordinal(must(PyLong_FromLongLong(mine.ordinal)));
      const Owned current(
          must(PyObject_CallMethodOneArg(kind.kind, names().current_stream, ordinal.get())));
      handle = number(current.get());
    } else {
      Py_RETURN_NONE;
    }
    std::uintptr_t target = mine.pointer;
    if (out != Py_None && out != x) {
      Glance theirs;
      if (Py_TYPE(out) != Py_TYPE(x) || !glance(kind, out, &theirs) ||
          !is_same(theirs.dtype.get(), mine.dtype.get()) || theirs.ordinal != mine.ordinal)
        Py_RETURN_NONE;
      target = theirs.pointer;
      key.written = static_cast<std::int64_t>(theirs.size);
    }
    if (mine.ordinal != device_) Py_RETURN_NONE;
    const Py_hash_t of_how = PyObject_Hash(how);
    if (of_how == -1) {  // an argument that cannot be right
      if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw PythonError();
      PyErr_Clear();
      Py_RETURN_NONE;
    }
    key.size = mine.size;
    key.dtype = std::move(mine.dtype);
    key.how = Owned::share(how);
    const std::shared_ptr<const KnownCall> known = find(key, static_cast<std::uint64_t>(of_how));
    if (known == nullptr) return told(key);
    const auto gap = static_cast<std::int64_t>(target - mine.pointer);
    if (gap != known->gap && ((-known->nbytes[1] < gap && gap < known->nbytes[0]) ||
                              (known->gap == 0 && 0 < known->nbytes[0])))
      return told(key);  // overlaps otherwise, or no longer does: in place may be another algorithm
    Call call = known->call;
    call.input = reinterpret_cast<const std::byte*>(mine.pointer);
    call.output = reinterpret_cast<std::byte*>(target);
    caller_.put(call, known->options, handle);
    if (writes && !kind.plain) {
      PyObject* const target_array = out == Py_None ? x : out;
      Owned(must(PyObject_CallMethodOneArg(kind.kind, names().has_written, target_array)));
    }
    return PyTuple_New(0);
  }

  // key: what `call` returned. arguments: the 13 numbers of parse_call.
  void learn(PyObject* key, PyObject* options, PyObject* arguments, PyObject* nbytes) {
    auto made = std::make_shared<KnownCall>();
    const DeviceOptions* const how = options_of(options);
    if (how == nullptr) throw PythonError();
    int beside = 0;
    PyObject *dtype = nullptr, *of_user = nullptr;
    long long written = 0, first = 0, second = 0;
    unsigned long long size = 0;
    if (PyArg_ParseTuple(key, "OKLpO", &dtype, &size, &written, &beside, &of_user) == 0 ||
        PyArg_ParseTuple(nbytes, "LL", &first, &second) == 0)
      throw PythonError();
    made->key.dtype = Owned::share(dtype);
    made->key.size = size;
    made->key.written = written;
    made->key.beside = beside != 0;
    made->key.how = Owned::share(of_user);
    made->nbytes[0] = first;
    made->nbytes[1] = second;
    Communicator::Options numbers;
    if (!parse_call(reinterpret_cast<PyTupleObject*>(arguments)->ob_item,
                    PyTuple_GET_SIZE(arguments), caller_.comm->size(), &made->call, &numbers))
      throw PythonError();
    made->gap = made->call.output -
                reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(made->call.input));
    made->options = *how;
    made->options.order = numbers.order;
    made->options.factor[0] = numbers.factor[0];
    made->options.factor[1] = numbers.factor[1];
    const Py_hash_t of_how = PyObject_Hash(of_user);
    if (of_how == -1) throw PythonError();
    // What a key holds may run code of the user when it goes, which may make calls too.
    const auto old = calls_.size() >= most_ ? std::exchange(calls_, {}) : decltype(calls_)();
    calls_[made->key.hash(static_cast<std::uint64_t>(of_how))] = std::move(made);
  }

  std::size_t kept() const { return calls_.size(); }

 private:
  static bool is_same(PyObject* a, PyObject* b) {
    if (a == b) return true;
    const int same = PyObject_RichCompareBool(a, b, Py_EQ);
    if (same < 0) throw PythonError();
    return same != 0;
  }

  static PyObject* told(const Key& key) {
    return must(Py_BuildValue("(OKLOO)", key.dtype.get(), static_cast<unsigned long long>(key.size),
                              static_cast<long long>(key.written), key.beside ? Py_True : Py_False,
                              key.how.get()));
  }

  // Nothing if x is of a type that was not seen before. Kinds and types stay.
  Kind kind_of(PyObject* x) {
    if (Py_TYPE(x) == last_type_) return last_kind_;
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
    PyObject* const kind = PyDict_GetItemWithError(kinds_.get(), type);
    if (kind == nullptr) {
      if (PyErr_Occurred() != nullptr) throw PythonError();
      return {};
    }
    last_kind_ = {kind, is_true(attribute(kind, names().plain).get())};
    last_type_ = Py_TYPE(x);
    return last_kind_;
  }

  // False where only a closer look can judge, or the array is on the host.
  static bool glance(const Kind& kind, PyObject* x, Glance* seen) {
    if (kind.plain) {
      const Owned flags = attribute(x, names().flags);
      if (!is_true(attribute(flags.get(), names().c_contiguous).get())) return false;
      const Owned data = attribute(x, names().data);
      seen->pointer = number(attribute(data.get(), names().ptr).get());
      seen->ordinal = whole_number(attribute(data.get(), names().device_id).get());
      seen->size = number(attribute(x, names().size).get());
      seen->dtype = attribute(x, names().dtype);
      return true;
    }
    const Owned found(must(PyObject_CallMethodOneArg(kind.kind, names().glance, x)));
    if (found.get() == Py_None) return false;
    PyObject* dtype = nullptr;
    unsigned long long pointer = 0, size = 0;
    long long ordinal = 0;
    if (PyArg_ParseTuple(found.get(), "KKOL", &pointer, &size, &dtype, &ordinal) == 0)
      throw PythonError();
    *seen = {pointer, size, Owned::share(dtype), ordinal};
    return true;
  }

  // (Two keys of one hash take turns.)
  std::shared_ptr<const KnownCall> find(const Key& key, std::uint64_t of_how) const {
    const auto found = calls_.find(key.hash(of_how));
    if (found == calls_.end()) return nullptr;
    // It stays while a comparison runs code of the user, which may make calls too.
    std::shared_ptr<const KnownCall> known = found->second;
    const Key& own = known->key;
    if (own.dtype.get() != key.dtype.get() || own.size != key.size || own.written != key.written ||
        own.beside != key.beside || !is_same(own.how.get(), key.how.get()))
      return nullptr;
    return known;
  }

  DeviceCaller caller_;
  std::int64_t device_;
  Owned kinds_, stream_type_;
  std::size_t most_;
  PyTypeObject* last_type_ = nullptr;  // of an array
  Kind last_kind_;
  std::unordered_map<std::uint64_t, std::shared_ptr<const KnownCall>> calls_;
};

KnownCalls& known_calls(PyObject* self) {
  return *static_cast<KnownCalls*>(PyCapsule_GetPointer(self, kKnownCalls));
}

bool has_arguments(Py_ssize_t nargs, Py_ssize_t least, Py_ssize_t most) {
  if (nargs >= least && nargs <= most) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd to %zd", nargs, least, most);
  return false;
}

PyObject* known_call(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (!has_arguments(nargs, 4, 5)) return nullptr;
  try {
    return known_calls(self).call(args[0], args[1], args[2], args[3],
                                  nargs == 4 || is_true(args[4]));
  } catch (...) {
    set_error_from_exception();
    return nullptr;
  }
}

PyObject* known_learn(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (!has_arguments(nargs, 4, 4)) return nullptr;
  try {
    known_calls(self).learn(args[0], args[1], args[2], args[3]);
  } catch (...) {
    set_error_from_exception();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* known_kept(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(known_calls(self).kept());
}

template <class Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef known_calls_methods[] = {
    {"call", as_method(known_call), METH_FASTCALL, "Makes a call that is known."},
    {"learn", as_method(known_learn), METH_FASTCALL, "Keeps how a call was made."},
    {"kept", known_kept, METH_NOARGS, "How many calls are kept."},
};

}  // namespace

void tell_peers(DeviceCommunicator& device, const Error& error) {
  switch (error.kind()) {
    case ErrorKind::mismatch:
    case ErrorKind::peer_died:
      device.abort(error.what(), error.kind(), error.peer());
      break;
    case ErrorKind::aborted:
    case ErrorKind::invalid:
    case ErrorKind::system:
      device.abort(error.what());
      break;
    case ErrorKind::deadline:
    case ErrorKind::closed:
    case ErrorKind::unsupported:
      break;
  }
}

PyObject* make_device_options(DeviceOptions options) {
  static std::atomic<std::uint64_t> last{0};
  options.id = ++last;
  return enclose(new DeviceOptions(std::move(options)), kOptions);
}

PyObject* make_device_call(std::shared_ptr<Communicator> comm,
                           std::shared_ptr<DeviceCommunicator> device) {
  const Owned self(enclose(new DeviceCaller{std::move(comm), std::move(device)}, kDeviceCaller));
  return must(PyCFunction_New(&device_call_method, self.get()));  // which holds it
}

std::vector<PyObject*> make_known_calls(std::shared_ptr<Communicator> comm,
                                        std::shared_ptr<DeviceCommunicator> device, int ordinal,
                                        PyObject* kinds, PyObject* stream_type, std::size_t most) {
  const Owned self(enclose(
      new KnownCalls({std::move(comm), std::move(device)}, ordinal, kinds, stream_type, most),
      kKnownCalls));
  std::vector<PyObject*> functions;
  for (PyMethodDef& method : known_calls_methods)
    functions.push_back(must(PyCFunction_New(&method, self.get())));
  return functions;
}

}  // namespace collectives
