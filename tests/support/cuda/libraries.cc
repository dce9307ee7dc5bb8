// cuBLAS: each product is one kernel by its name. Of cuDNN there is only a version.
#include <cstdint>
#include <cstring>

#include "machine.hh"

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
};

Handle* of(void* handle) { return static_cast<Handle*>(handle); }

void kernel(void* handle, const char* name) { machine::log("K %d %p %s", machine::device(), of(handle)->stream, name); }

}  // namespace

extern "C" {

int cublasCreate_v2(void** handle) { return *handle = new Handle, 0; }
int cublasSetStream_v2(void* handle, cudaStream_t stream) { return of(handle)->stream = stream, 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
int cublasGemmEx(void* handle, int, int, int m, int n, int k, const void*, const void*, int a, int, const void*, int, int,
                 const void*, void*, int c, int, int compute, int) {
  machine::log("K %d %p cublasGemmEx %dx%dx%d types %d to %d by %d", machine::device(), of(handle)->stream, m, n, k, a, c,
               compute);
  return 0;
}
#define PRODUCT(name) \
  int name(void* handle, ...) { return kernel(handle, #name), 0; }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)

int cublasLtMatmulDescCreate(void** made, int, int) { return *made = machine::unique(), 0; }
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { return *made = machine::unique(), 0; }
int cublasLtMatmulPreferenceCreate(void** made) { return *made = machine::unique(), 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
  return *found = 1, 0;
}
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                   void*, const void*, void*, size_t, cudaStream_t stream) {
  machine::log("K %d %p cublasLtMatmul", machine::device(), stream);
  return 0;
}
size_t cublasLtGetVersion() { return 130101; }

size_t cudnnGetVersion() { return 92000; }
size_t cudnnGetCudartVersion() { return 13000; }
const char* cudnnGetErrorString(int) { return "the stand-in has no cuDNN"; }

}  // extern "C"
