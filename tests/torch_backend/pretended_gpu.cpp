// A device for torch that has streams and events and does nothing but write down what is asked of
// it: so that what runs in C++ on CUDA tensors can be tested without a GPU. Device
// `privateuseone:0`; its memory is the host's. Stream 0 is current at first.
#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct State {
  std::mutex mutex;
  std::vector<std::string> said;
  c10::StreamId current = 0;
  std::int64_t made = 0;               // events
  std::int64_t living = 0;             // of them
  std::int64_t with_gil = 0;           // things put on streams by a thread that had the GIL
  std::map<std::int64_t, bool> ended;  // by number
};

State& state() {
  static State state;
  return state;
}

std::string name(const c10::Stream& stream) { return "stream " + std::to_string(stream.id()); }
std::string name(void* event) {
  return "event " + std::to_string(reinterpret_cast<std::int64_t>(event));
}

void say(const std::string& what) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().said.push_back(what);
}

// Says what is put on a stream. CUDA waits for room there.
void put(const std::string& what) {
  say(what);
  state().with_gil += PyGILState_Check();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return c10::Device(kType, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, state().current);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 99);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    state().current = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = reinterpret_cast<void*>(++state().made);
      ++state().living;
    }
    put(name(stream) + ": " + name(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    put(name(stream) + " waits for " + name(event));
  }
  bool queryEvent(void* event) const override {
    return state().ended[reinterpret_cast<std::int64_t>(event)];
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) --state().living;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  put(name(stream) + " uses " + std::to_string(tensor.numel()) + " elements");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("record_stream", record_stream); }

// A tensor there, in the memory of one on the host, which must live as long.
at::Tensor there(const at::Tensor& host) {
  const c10::Device device(kType, 0);
  c10::Storage storage(c10::Storage::use_byte_size_t(), host.nbytes(),
                       c10::DataPtr(host.data_ptr(), device));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  return tensor;
}

}  // namespace

PYBIND11_MODULE(pretended_gpu, m) {
  m.def("there", there);
  m.def("say", say);
  m.def("said", [] {
    const std::lock_guard<std::mutex> lock(state().mutex);
    return std::exchange(state().said, {});
  });
  m.def("end", [](std::int64_t event) { state().ended[event] = true; });
  m.def("living_events", [] { return state().living; });
  m.def("with_gil", [] { return std::exchange(state().with_gil, 0); });
  m.def("set_current", [](c10::StreamId stream) { state().current = stream; });
  m.attr("device_type") = static_cast<std::int64_t>(kType);
}
