#include "cuda_words.hpp"

#include <cuda.h>

#include <string>

#include "cuda_driver.hpp"
#include "errors.hpp"

namespace collectives::device {

namespace {

using Batch = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

Batch batch() {
  static const auto found = of_driver<Batch>("cuStreamBatchMemOp", 11070);
  return found;
}

}  // namespace

bool has_words() { return batch() != nullptr; }

void exchange_words(cudaStream_t stream, const std::vector<u64*>& to, const std::vector<u64*>& from,
                    u64 value) {
  if (!has_words()) throw Error(ErrorKind::unsupported, "the driver has no cuStreamBatchMemOp");
  using Operation = CUstreamBatchMemOpParams;
  std::vector<Operation> operations;
  operations.reserve(to.size() + from.size());
  const auto add = [&](auto kind, CUstreamBatchMemOpType type, u64* word, unsigned flags) {
    auto& one = operations.emplace_back().*kind;
    one = {};
    one.operation = type;
    one.address = reinterpret_cast<CUdeviceptr>(word);
    one.value64 = value;
    one.flags = flags;
  };
  for (u64* const word : to)  // behind a fence
    add(&Operation::writeValue, CU_STREAM_MEM_OP_WRITE_VALUE_64, word,
        CU_STREAM_WRITE_VALUE_DEFAULT);
  for (u64* const word : from)
    add(&Operation::waitValue, CU_STREAM_MEM_OP_WAIT_VALUE_64, word, CU_STREAM_WAIT_VALUE_GEQ);
  const auto count = static_cast<unsigned>(operations.size());
  const CUresult result = batch()(stream, count, operations.data(), 0);
  if (result != CUDA_SUCCESS)
    throw Error(ErrorKind::system,
                "cuStreamBatchMemOp: error " + std::to_string(static_cast<int>(result)));
}

}  // namespace collectives::device
