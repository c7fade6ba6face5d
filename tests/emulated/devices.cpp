// The emulated CUDA runtime's devices: how many, what lies between them, and errors. See README.md
// for what the runtime promises and what it leaves out.
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "runtime.hpp"

namespace emulated {
namespace {

int setting(const char* name, int otherwise) {
  const char* words = std::getenv(name);
  return words != nullptr && *words != 0 ? std::atoi(words) : otherwise;
}

// Names an environment variable the way from one GPU to another, or to "host", as in "0-1 1-host"?
bool names(const char* variable, const std::string& from, const std::string& to) {
  const char* words = std::getenv(variable);
  if (words == nullptr) return false;
  return (" " + std::string{words} + " ").find(" " + from + "-" + to + " ") != std::string::npos;
}

}  // namespace

int devices() {
  static const int n = setting("EMULATED_GPUS", 2);
  return n;
}
int connections() {
  static const int n = setting("EMULATED_CONNECTIONS", 0);
  return n;
}
// Of a device: "8 3" has 8 for the first and 3 for all others.
int processors(int device) {
  static const auto all = [] {
    const char* words = std::getenv("EMULATED_PROCESSORS");
    std::istringstream text(words != nullptr && *words != 0 ? words : "8");
    std::vector<int> found;
    for (int n = 0; text >> n;) found.push_back(n);
    return found;
  }();
  return device < static_cast<int>(all.size()) ? all[static_cast<std::size_t>(device)] : all.back();
}

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

bool have_peer_access(int device, int peer) {
  const std::string one = std::to_string(device), other = std::to_string(peer);
  return !names("EMULATED_NO_PEER", one, other) && !names("EMULATED_NO_PEER", other, one);
}
unsigned losing_ways(int device) {
  const std::string from = std::to_string(device);
  unsigned loses = names("EMULATED_LOSES", from, "host") ? 1u << kHost : 0;
  for (int q = 0; q < devices(); ++q)
    if (names("EMULATED_LOSES", from, std::to_string(q))) loses |= 1u << q;
  return loses;
}

}  // namespace emulated

using namespace emulated;

extern "C" {

// ---- errors -------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorCallRequiresNewerDriver:
      return "cudaErrorCallRequiresNewerDriver";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorPeerAccessUnsupported:
      return "cudaErrorPeerAccessUnsupported";
    default:
      return "cudaErrorInvalidValue";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// ---- devices ------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int device) {
  switch (what) {
    case cudaDevAttrMultiProcessorCount:
      *value = processors(device);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrGPUDirectRDMAWritesOrdering:  // as GPUs before Hopper
      *value = cudaGPUDirectRDMAWritesOrderingNone;
      return cudaSuccess;
    case cudaDevAttrGPUDirectRDMAFlushWritesOptions:
      *value = cudaFlushGPUDirectRDMAWritesOptionHost;
      return cudaSuccess;
  }
  return fail(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTarget,
                                               cudaFlushGPUDirectRDMAWritesScope) {
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* words, int length, int device) {
  std::snprintf(words, static_cast<std::size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* words) {
  unsigned found = 0;
  if (std::sscanf(words, "0000:%02x:00.0", &found) != 1) return fail(cudaErrorInvalidValue);
  *device = static_cast<int>(found);
  return *device < devices() ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int device, int peer) {
  *value = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer && have_peer_access(device, peer);
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  if (peer == current_device) return fail(cudaErrorInvalidDevice);
  return have_peer_access(current_device, peer) ? cudaSuccess
                                                : fail(cudaErrorPeerAccessUnsupported);
}
cudaError_t cudaDeviceSynchronize() {
  wait_for_device(current_device);
  return cudaSuccess;
}

}  // extern "C"
