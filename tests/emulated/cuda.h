// The part of the CUDA driver's interface that the GPU engine uses, emulated on a CPU: see
// README.md. Its functions are found by cudaGetDriverEntryPointByVersion.
#pragma once

#include "cuda_runtime_api.h"

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900 };
typedef cudaStream_t CUstream;
typedef unsigned long long CUdeviceptr;

enum CUstreamBatchMemOpType {
  CU_STREAM_MEM_OP_WAIT_VALUE_64 = 4,
  CU_STREAM_MEM_OP_WRITE_VALUE_64 = 5
};
enum { CU_STREAM_WAIT_VALUE_GEQ = 0, CU_STREAM_WRITE_VALUE_DEFAULT = 0 };
union CUstreamBatchMemOpParams {
  CUstreamBatchMemOpType operation;
  struct {
    CUstreamBatchMemOpType operation;
    CUdeviceptr address;
    unsigned long long value64;
    unsigned flags;
  } waitValue, writeValue;
};

namespace emulated {

CUresult batch_mem_op(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
                      unsigned flags);

}  // namespace emulated
