// Calls on arrays that mean nothing but their elements, without the general path's look at what
// else they may be: that takes ten times as long as a small call.
#include "python_caller.hpp"

namespace collectives {
namespace {

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
    return hold(x, flags);
  }
  // The same, for an array of numpy alone.
  bool get_array(PyObject* x, int flags) { return Py_TYPE(x) == ndarray() && hold(x, flags); }
  std::byte* data() const { return static_cast<std::byte*>(view.buf); }
  std::size_t bytes() const { return static_cast<std::size_t>(view.len); }
  std::uint64_t count() const { return bytes() / size_of(dtype); }
  // Along the first axis; a scalar is one.
  std::uint64_t rows() const {
    return view.ndim == 0 ? 1 : static_cast<std::uint64_t>(view.shape[0]);
  }

  Py_buffer view;
  Dtype dtype = Dtype::uint8;

 private:
  bool hold(PyObject* x, int flags) {
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

  bool held_ = false;
};

bool apart(const std::byte* a, std::size_t a_bytes, const std::byte* b, std::size_t b_bytes) {
  return a + a_bytes <= b || b + b_bytes <= a;
}

// What serves a call of so many bytes.
int chosen(const Caller& caller, Collective collective, std::size_t bytes) {
  const auto& choices = caller.choices[static_cast<int>(collective)];
  for (const auto& [limit, algorithm] : choices)
    if (bytes <= limit) return algorithm;
  return choices.back().second;
}

// Runs the call on `arrays` of Python's.
PyObject* run_plain(Caller& caller, const Call& call, int algorithm, std::size_t bytes,
                    PyObject* const* arrays, Py_ssize_t narrays) {
  Communicator::Options options;
  options.algorithm = algorithm;
  try {
    caller.run(call, options, bytes);
  } catch (...) {
    // Messages may still leave from them, so they stay for good.
    if (caller.comm->lends())
      for (Py_ssize_t i = 0; i < narrays; ++i) Py_INCREF(arrays[i]);
    set_error_from_exception();
    return nullptr;
  }
  Py_RETURN_TRUE;
}

// A call in the making: what `plain` was given, and how its arrays lie.
class Plain {
 public:
  Plain(int rank, int nranks, PyObject* x, PyObject* out)
      : rank_(rank), n_(static_cast<std::uint64_t>(nranks)), x_given_(x), out_given_(out) {}

  // False if the general path must judge; else `call` and `bytes`, by which the algorithm is
  // chosen, are complete.
  bool read() {
    const bool is_root = rank_ == call.root;
    switch (call.collective) {
      case Collective::all_reduce:
        return reads(out_given_ == Py_None) && whole();
      case Collective::reduce:
        return is_root ? reads(out_given_ == Py_None) && whole() : reads(false);
      case Collective::broadcast:
        return reads(!is_root);
      case Collective::reduce_scatter:
        return reads(false) && writes() && one_block(call.in, x_, out_);
      case Collective::all_gather:
        return reads(false) && writes() && one_block(call.out, out_, x_);
      case Collective::gather:
        return reads(false) && gathers(is_root);
      case Collective::scatter:
        return scatters(is_root);
      case Collective::all_to_all:
        return reads(false) && writes() && exchanges();
      case Collective::barrier:
        return x_given_ == Py_None && out_given_ == Py_None;
    }
    return false;
  }

  Call call;
  std::size_t bytes = 0;

 private:
  bool reads(bool writable) {
    if (!x_.get_array(x_given_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) return false;
    call.dtype = x_.dtype;
    call.input = call.output = x_.data();
    call.count = x_.count();
    bytes = x_.bytes();
    return !reduces(call.collective) || why_unsupported(call.op, call.dtype).empty();
  }
  bool writes() {
    if (!out_.get_array(out_given_, PyBUF_WRITABLE) || out_.dtype != call.dtype) return false;
    call.output = out_.data();
    return true;
  }

  // A vector, in place or to another array.
  bool whole() {
    if (out_given_ == Py_None) return true;
    if (!writes() || out_.bytes() != x_.bytes()) return false;
    return call.input == call.output || apart(x_.data(), x_.bytes(), out_.data(), out_.bytes());
  }

  // `all` has a block a rank, as numpy.array_split makes them, and `one` is this rank's, or goes
  // there.
  bool one_block(Blocks& blocks, const Buffer& all, const Buffer& one) {
    const std::uint64_t total = all.count();
    blocks =
        total % n_ == 0 ? Blocks::equal(total / n_) : Blocks::split(total, static_cast<int>(n_));
    if (one.count() != blocks.length(rank_)) return false;
    call.count = 0;
    bytes = all.bytes();
    const std::byte* own = all.data() + blocks.offset(rank_) * size_of(call.dtype);
    return one.data() == own || apart(all.data(), all.bytes(), one.data(), one.bytes());
  }

  bool gathers(bool is_root) {
    const std::uint64_t each = x_.count();
    call.out = Blocks::equal(each);
    if (is_root) return writes() && out_.count() == each * n_ && one_block(call.out, out_, x_);
    call.output = nullptr;
    call.count = 0;
    bytes = x_.bytes() * n_;
    return true;
  }

  bool scatters(bool is_root) {
    if (is_root)
      return reads(false) && x_.rows() % n_ == 0 && writes() && out_.count() == x_.count() / n_ &&
             one_block(call.in, x_, out_);
    if (!out_.get_array(out_given_, PyBUF_WRITABLE)) return false;
    call.dtype = out_.dtype;
    call.output = out_.data();
    call.in = Blocks::equal(out_.count());
    bytes = out_.bytes() * n_;
    return true;
  }

  bool exchanges() {
    if (x_.rows() % n_ != 0 || out_.bytes() != x_.bytes()) return false;
    call.in = call.out = Blocks::equal(x_.count() / n_);
    call.count = 0;
    return apart(x_.data(), x_.bytes(), out_.data(), out_.bytes());
  }

  const int rank_;
  const std::uint64_t n_;
  PyObject *const x_given_, *const out_given_;
  Buffer x_, out_;
};

}  // namespace

PyObject* plain_sum(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Caller& caller = Caller::of(self);
  constexpr auto kSum = static_cast<int>(Collective::all_reduce);
  if (nargs < 1 || nargs > 2 || caller.choices[kSum].empty()) Py_RETURN_FALSE;
  Buffer x, out;
  if (!x.get(args[0], nargs == 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) Py_RETURN_FALSE;
  Call call;
  call.dtype = x.dtype;
  call.input = call.output = x.data();
  call.count = x.count();
  if (nargs == 2) {
    if (!out.get(args[1], PyBUF_WRITABLE) || out.dtype != x.dtype || out.view.len != x.view.len)
      Py_RETURN_FALSE;
    call.output = out.data();
    if (call.output != call.input && !apart(x.data(), x.bytes(), out.data(), out.bytes()))
      Py_RETURN_FALSE;
  }
  const int algorithm = chosen(caller, call.collective, x.bytes());
  return run_plain(caller, call, algorithm, x.bytes(), args, nargs);
}

PyObject* plain_call(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 6) {
    PyErr_Format(PyExc_TypeError, "a plain call takes 6 arguments, not %zd", nargs);
    return nullptr;
  }
  Caller& caller = Caller::of(self);
  const auto number = PyLong_AsUnsignedLong(args[0]);
  const long op = PyLong_AsLong(args[3]), root = PyLong_AsLong(args[4]);
  const bool by_size = args[5] == Py_None;
  const long forced = by_size ? 0 : PyLong_AsLong(args[5]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (number >= kCollectiveCount || op < 0 || op >= kOpCount ||
      static_cast<Op>(op) == Op::premul_sum || root < 0 || root >= caller.comm->size() ||
      (by_size && caller.choices[number].empty()))
    Py_RETURN_FALSE;
  Plain plain(caller.comm->rank(), caller.comm->size(), args[1], args[2]);
  plain.call.collective = static_cast<Collective>(number);
  plain.call.op = static_cast<Op>(op);
  plain.call.root = static_cast<int>(root);
  if (!plain.read()) Py_RETURN_FALSE;
  const int algorithm =
      by_size ? chosen(caller, plain.call.collective, plain.bytes) : static_cast<int>(forced);
  return run_plain(caller, plain.call, algorithm, plain.bytes, args + 1, 2);
}

PyObject* plain_transfer(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 4) {
    PyErr_Format(PyExc_TypeError, "a transfer takes 4 arguments, not %zd", nargs);
    return nullptr;
  }
  Communicator& comm = *Caller::of(self).comm;
  const bool sends = args[0] == Py_True;
  const long peer = PyLong_AsLong(args[2]);
  const unsigned long long tag = PyLong_AsUnsignedLongLong(args[3]);
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  Buffer x;
  if (peer < 0 || peer >= comm.size() || tag > 0xffffffff ||
      !x.get_array(args[1], sends ? PyBUF_SIMPLE : PyBUF_WRITABLE))
    Py_RETURN_FALSE;
  try {
    comm.transfer({{sends, static_cast<int>(peer), static_cast<std::uint32_t>(tag), x.dtype,
                    x.data(), x.bytes()}});
  } catch (...) {
    set_error_from_exception();
    return nullptr;
  }
  Py_RETURN_TRUE;
}

PyObject* learn_choice(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2 || !PyList_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "choose takes the number of a collective and a list");
    return nullptr;
  }
  const auto number = PyLong_AsUnsignedLong(args[0]);
  if (PyErr_Occurred() == nullptr && number >= kCollectiveCount)
    PyErr_Format(PyExc_ValueError, "there is no collective %lu", number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  std::vector<std::pair<std::uint64_t, int>> choices;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); ++i) {
    unsigned long long limit = 0;
    int algorithm = 0;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(args[1], i), "Ki", &limit, &algorithm)) return nullptr;
    choices.emplace_back(limit, algorithm);
  }
  Caller::of(self).choices[number] = std::move(choices);
  Py_RETURN_NONE;
}

}  // namespace collectives
