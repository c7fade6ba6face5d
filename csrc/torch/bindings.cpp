// collectives._torch_2_13 (say): calls of a process group that are like ones before, with no Python
// in between, whether torch's C++ makes them (DDP, for each bucket of gradients) or Python.
// Compiled against one torch, for which alone it is. All else of the process group is
// collectives/torch.
#include <ATen/ATen.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace collectives {
namespace {

using c10::ivalue::Future;

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Lets go of the GIL, if this thread has it: where there is no room on a stream yet, CUDA waits,
// and what makes room may need another thread of Python.
class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check() != 0) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// A call on a stream, for which the host does not wait. One beside the stream that computes ends
// with `put`; one on it is ordered as it is.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(c10d::OpType type, const char* title, at::Tensor output, c10::Stream stream)
      : Work(-1, type, title, std::vector<at::Tensor>{output}),
        outputs_{std::move(output)},
        stream_(stream) {}

  // The call is on the stream.
  void put(bool beside) {
    if (beside) ended_.emplace(stream_.device_type()).record(stream_);
    if (recordFunctionEndCallback_) recordFunctionEndCallback_();  // of the profiler
  }

  bool isCompleted() override { return !ended_ || ended_->query(); }
  bool isSuccess() const override { return !ended_ || ended_->query(); }
  std::exception_ptr exception() const override { return nullptr; }
  int sourceRank() const override { TORCH_CHECK(false, "only a recv has a source rank"); }
  std::vector<at::Tensor> result() override { return outputs_; }

  void synchronize() override {
    const WithoutGil released;
    if (ended_) ended_->block(current_stream(stream_.device()));
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }

  // Complete from the start for the host. Of a list that C++ can read: what Python puts into a
  // future is pickled to find the tensors in it.
  c10::intrusive_ptr<Future> getFuture() override {
    const WithoutGil released;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) {
      auto future = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                                std::vector<c10::Device>{stream_.device()});
      const c10::StreamGuard on(stream_);
      future->markCompleted(at::IValue(outputs_));
      future_ = std::move(future);
    }
    return future_;
  }

 private:
  const std::vector<at::Tensor> outputs_;
  const c10::Stream stream_;
  std::optional<c10::Event> ended_;
  std::mutex mutex_;
  c10::intrusive_ptr<Future> future_;
};

// A stream beside the one that computes.
struct Side {
  explicit Side(c10::Stream stream) : stream(stream), before(stream.device_type()) {}

  const c10::Stream stream;
  c10::Event before;  // on the stream that computes; recorded anew by each call
};

// How calls of one kind and size are put on a stream: `call` of the core with these arguments, but
// for the stream, where it is the current one, and the addresses.
struct Plan {
  static constexpr std::size_t kArguments = 15, kStream = 1, kSource = 6, kTarget = 7;

  Side* side = nullptr;  // nullptr: on the current stream
  py::object call;
  std::array<py::object, kArguments> arguments;
};

struct Kind {
  const char* name;  // of the collective
  c10d::OpType type;
  const char* title;  // for the profiler
};

constexpr Kind kKinds[] = {
    {"all_reduce", c10d::OpType::ALLREDUCE, "collectives:all_reduce"},
    {"all_gather", c10d::OpType::_ALLGATHER_BASE, "collectives:_all_gather_base"},
    {"reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, "collectives:_reduce_scatter_base"},
};

const Kind& kind_of(const std::string& name) {
  for (const Kind& kind : kKinds)
    if (name == kind.name) return kind;
  throw py::value_error("no kind of call: " + name);
}

// A call as it was asked for.
struct Asked {
  at::Tensor target, source;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED;
  bool beside = false;
};

// False for those of subclasses that take operations over from torch, such as a DTensor, and for
// those whose memory was freed.
bool has_memory(const at::Tensor& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) && tensor.has_storage() &&
         (tensor.numel() == 0 || tensor.storage().data() != nullptr);
}

bool is_plain(const at::Tensor& tensor) {
  return !tensor.is_cpu() && tensor.layout() == at::kStrided && has_memory(tensor) &&
         tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// The tensor of a Python object; an undefined one if it is none.
at::Tensor tensor_of(py::handle object) {
  return THPVariable_Check(object.ptr()) ? THPVariable_Unpack(object.ptr()) : at::Tensor();
}

// `allreduce(tensors, options)` or `f(output, input, options)`, as torch makes them, with one
// tensor. False: another way to call, or another kind of tensor or op.
bool read(const py::args& arguments, Asked* asked) {
  if (arguments.size() == 2) {
    if (!PyList_Check(arguments[0].ptr()) || PyList_GET_SIZE(arguments[0].ptr()) != 1) return false;
    if (!py::isinstance<c10d::AllreduceOptions>(arguments[1])) return false;
    const auto& options = arguments[1].cast<const c10d::AllreduceOptions&>();
    asked->target = asked->source = tensor_of(PyList_GET_ITEM(arguments[0].ptr(), 0));
    asked->op = options.reduceOp.op_;
    asked->beside = options.asyncOp;
  } else if (arguments.size() == 3) {
    asked->target = tensor_of(arguments[0]);
    asked->source = tensor_of(arguments[1]);
    if (py::isinstance<c10d::AllgatherOptions>(arguments[2])) {
      asked->beside = arguments[2].cast<const c10d::AllgatherOptions&>().asyncOp;
    } else if (py::isinstance<c10d::ReduceScatterOptions>(arguments[2])) {
      const auto& options = arguments[2].cast<const c10d::ReduceScatterOptions&>();
      asked->op = options.reduceOp.op_;
      asked->beside = options.asyncOp;
    } else {
      return false;
    }
  } else {
    return false;
  }
  if (!asked->target.defined() || !asked->source.defined()) return false;
  if (asked->op == c10d::ReduceOp::PREMUL_SUM) return false;  // its factor may be another each time
  return is_plain(asked->target) && is_plain(asked->source) &&
         asked->target.device() == asked->source.device() &&
         asked->target.scalar_type() == asked->source.scalar_type();
}

// A method of a process group.
//
// group          has `_coalesced`, None unless calls are being gathered into one
// plan           (target, source, op or None, beside) -> None, or the side stream (None: the call
//                goes on the current stream), what puts a call there, and its arguments. It is
//                asked once for each device, dtype, op and size, and current stream if the call
//                goes there
// slow           makes the calls that have no plan: the method in Python, unbound
// track          has `_lock`, which is held while a call is made, and counts `calls`
// stream_handle  the handle of the current stream of a device, by its index
class Method {
 public:
  Method(const std::string& kind, const py::object& group, py::object plan, py::object slow,
         py::object track, py::object stream_handle)
      : kind_(kind_of(kind)),
        group_(py::weakref(group)),
        plan_(std::move(plan)),
        slow_(std::move(slow)),
        track_(std::move(track)),
        lock_(track_.attr("_lock")),
        stream_handle_(std::move(stream_handle)) {}

  py::object call(const py::args& arguments, const py::kwargs& named) {
    const py::object group = group_();
    if (group.is_none()) throw std::runtime_error("the process group is gone");
    Asked asked;
    if (named.empty() && read(arguments, &asked) && group.attr("_coalesced").is_none() &&
        !in_the_way(group, asked))
      if (const std::shared_ptr<const Plan> plan = plan_for(group, asked)) return put(*plan, asked);
    return slow_(group, *arguments, **named);
  }

 private:
  using Key = std::tuple<c10::DeviceIndex, bool, c10::StreamId, at::ScalarType,
                         c10d::ReduceOp::RedOpType, std::int64_t, std::int64_t>;

  // Does the source of a gather lie where other ranks' come, and not where its own does?
  bool in_the_way(const py::object& group, const Asked& asked) const {
    if (kind_.type != c10d::OpType::_ALLGATHER_BASE) return false;
    const auto* const target = static_cast<const char*>(asked.target.data_ptr());
    const auto* const source = static_cast<const char*>(asked.source.data_ptr());
    const auto bytes = static_cast<std::ptrdiff_t>(asked.source.nbytes());
    const auto all = static_cast<std::ptrdiff_t>(asked.target.nbytes());
    if (source >= target + all || target >= source + bytes) return false;
    return source - target != group.attr("_rank").cast<std::ptrdiff_t>() * bytes;
  }

  std::shared_ptr<const Plan> plan_for(const py::object& group, const Asked& asked) {
    const c10::Device device = asked.target.device();
    const Key key{device.index(),
                  asked.beside,
                  asked.beside ? 0 : current_stream(device).id(),
                  asked.target.scalar_type(),
                  asked.op,
                  asked.target.numel(),
                  asked.source.numel()};
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
    const bool reduces = asked.op != c10d::ReduceOp::UNUSED;
    const py::object made =
        plan_(group, asked.target, asked.source,
              reduces ? py::cast(asked.op) : py::object(py::none()), asked.beside);
    if (made.is_none()) return nullptr;
    const auto [stream, call, arguments] =
        made.cast<std::tuple<py::object, py::object, py::tuple>>();
    if (arguments.size() != Plan::kArguments) throw py::value_error("a plan has 15 arguments");
    const auto plan = std::make_shared<Plan>();
    if (!stream.is_none()) plan->side = &side_of(stream);
    plan->call = call;
    for (std::size_t i = 0; i < Plan::kArguments; ++i) plan->arguments[i] = arguments[i];
    if (plans_.size() >= kPlans) plans_.clear();
    return plans_[key] = plan;
  }

  // Of torch's stream object. Sides stay where they are: plans point to them.
  Side& side_of(const py::object& stream) {
    const auto number = [&](const char* name) { return stream.attr(name).cast<std::int64_t>(); };
    const auto index = static_cast<c10::DeviceIndex>(number("device_index"));
    const auto type = static_cast<c10::DeviceType>(number("device_type"));
    const c10::Stream side = c10::Stream::unpack3(number("stream_id"), index, type);
    return sides_.try_emplace(index, side).first->second;
  }

  py::object put(const Plan& plan, const Asked& asked) {
    const c10::Device device = asked.target.device();
    const c10::Stream current = current_stream(device);
    const c10::Stream stream = plan.side == nullptr ? current : plan.side->stream;
    auto work = c10::make_intrusive<StreamWork>(kind_.type, kind_.title, asked.target, stream);
    const auto address = [](const at::Tensor& tensor) {
      return py::int_(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()));
    };
    const py::int_ source = address(asked.source), target = address(asked.target);
    py::object handle = plan.arguments[Plan::kStream];
    if (plan.side == nullptr) handle = stream_handle_(device.index());
    std::array<PyObject*, Plan::kArguments> arguments;
    for (std::size_t i = 0; i < arguments.size(); ++i) arguments[i] = plan.arguments[i].ptr();
    arguments[Plan::kStream] = handle.ptr();
    arguments[Plan::kSource] = source.ptr();
    arguments[Plan::kTarget] = target.ptr();
    {
      const Locked locked(lock_);
      if (plan.side != nullptr) {
        const WithoutGil released;
        plan.side->before.record(current);
        plan.side->before.block(stream);
      }
      track_.attr("calls") = py::object(track_.attr("calls")) + one_;
      const py::object done = py::reinterpret_steal<py::object>(
          PyObject_Vectorcall(plan.call.ptr(), arguments.data(), arguments.size(), nullptr));
      if (!done) throw py::error_already_set();
      const WithoutGil released;
      work->put(plan.side != nullptr);
    }
    if (plan.side != nullptr) {  // so that their memory is given to nobody else before
      const WithoutGil released;
      asked.target.record_stream(stream);
      if (!asked.source.is_same(asked.target)) asked.source.record_stream(stream);
    }
    return py::cast(c10::intrusive_ptr<c10d::Work>(std::move(work)));
  }

  class Locked {
   public:
    explicit Locked(const py::object& lock) : lock_(lock) { lock_.attr("acquire")(); }
    ~Locked() { lock_.attr("release")(); }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

   private:
    const py::object& lock_;
  };

  static constexpr std::size_t kPlans = 4096;

  const Kind& kind_;
  const py::weakref group_;
  const py::object plan_, slow_, track_, lock_, stream_handle_;
  const py::int_ one_{1};
  std::map<c10::DeviceIndex, Side> sides_;
  std::map<Key, std::shared_ptr<const Plan>> plans_;
};

}  // namespace
}  // namespace collectives

PYBIND11_MODULE(COLLECTIVES_TORCH_MODULE, m) {
  using collectives::Method;
  m.doc() = "Calls of a process group that are like ones before.";
  py::module_::import("torch.distributed");  // has the Python types of options and works
  py::class_<Method>(m, "Method")
      .def(py::init<const std::string&, const py::object&, py::object, py::object, py::object,
                    py::object>(),
           py::arg("kind"), py::arg("group"), py::arg("plan"), py::arg("slow"), py::arg("track"),
           py::arg("stream_handle"))
      .def("__call__", &Method::call);
}
