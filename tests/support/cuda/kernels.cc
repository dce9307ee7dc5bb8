// Kernels: counted by name, whether the runtime or the driver launches them.
//
// Only fills are carried out, as what the host writes is: what a rank tells another one is often padded with a constant.
// Not with an infinity: a loss is read from memory that no kernel has written, and one that was left there ends the run.
#include <cuda.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include "machine.hh"

namespace {

std::mutex guard;
std::unordered_map<const void*, const char*>& mangled = *new std::unordered_map<const void*, const char*>;
struct Kernel {
  std::string name;
  size_t filled;  // bytes of a number that it fills a tensor with; 0 if it does something else
};
std::unordered_map<const void*, Kernel>& known = *new std::unordered_map<const void*, Kernel>;

size_t filled(const std::string& name) {  // of contiguous tensors: (int count, FillFunctor<T> {T}, array {T*}, …)
  static const std::pair<const char*, size_t> kinds[] = {
      {"<float>", 4}, {"<double>", 8}, {"<int>", 4}, {"<long>", 8}, {"<short>", 2}, {"<unsigned char>", 1},
      {"<signed char>", 1}, {"<bool>", 1}, {"<c10::BFloat16>", 2}, {"<c10::Half>", 2}};
  if (name.find("vectorized_elementwise_kernel") == name.npos && name.find("unrolled_elementwise_kernel") == name.npos)
    return 0;
  for (auto& [kind, size] : kinds)
    if (name.find(std::string("FillFunctor") + kind) != name.npos) return size;
  return 0;
}

const Kernel& of(const void* kernel) {
  auto found = known.find(kernel);
  if (found != known.end()) return found->second;
  auto own = mangled.find(kernel);
  const char* name = own == mangled.end() ? "unknown" : own->second;
  int status;
  char* plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string text = plain ? plain : name;
  free(plain);
  return known[kernel] = {text, filled(text)};
}

struct Shape {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local Shape shape;

}  // namespace

namespace machine {

void name_kernel(const void* kernel, const char* name) {
  std::lock_guard<std::mutex> lock(guard);
  mangled[kernel] = name;
  known.erase(kernel);
}

void launch(const void* kernel, cudaStream_t stream, void** arguments) {
  guard.lock();
  const Kernel& own = of(kernel);
  guard.unlock();
  log("K %d %p %.400s", device(), stream, own.name.c_str());
  if (!own.filled || !arguments) return;
  int count = *static_cast<int*>(arguments[0]);
  size_t size = own.filled;
  std::string value(static_cast<char*>(arguments[1]), size);
  if (own.filled == 4 && !std::isfinite(*reinterpret_cast<float*>(value.data()))) return;
  char* to = *static_cast<char**>(arguments[2]);
  submit(stream, [=] { return fill(to, value.data(), size, count), true; });
}

}  // namespace machine

extern "C" {

// What nvcc writes into a library for each of its kernels, and its launches.
void** __cudaRegisterFatBinary(void*) {
  static void* handle[8];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  machine::name_kernel(host, name);
}
int __cudaGetKernel(const void** kernel, const void* host) { return *kernel = host, 0; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  return shape = {grid, block, shared, stream}, 0;
}
int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = shape.grid, *block = shape.block, *shared = shape.shared, *static_cast<void**>(stream) = shape.stream;
  return 0;
}
int __cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return machine::launch(kernel, stream, arguments), 0;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return machine::launch(kernel, stream, arguments), cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return machine::launch(kernel, stream, arguments), cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  return machine::launch(kernel, config->stream, arguments), cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = 1024, found->numRegs = 32, found->binaryVersion = found->ptxVersion = 80;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) { return *blocks = 2, cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}

// The driver, as torch and Triton look it up.
CUresult nothing() { return CUDA_SUCCESS; }
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = machine::devices(), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int size, CUdevice) { return snprintf(name, size, "NVIDIA A100-SXM4-80GB"), CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return CUresult(cudaDeviceGetAttribute(value, cudaDeviceAttr(attribute), device));
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { return *flags = 0, *active = 1, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return *context = reinterpret_cast<CUcontext>(uintptr_t(device) + 1), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, machine::device()); }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = machine::device(), CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "refused by the stand-in for CUDA", CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** text) { return *text = "CUDA_ERROR", CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* module, const void*) { return *module = CUmodule(machine::unique()), CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = CUfunction(machine::unique());
  machine::name_kernel(*function, strdup(name));
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
  return *static_cast<CUdeviceptr*>(value) = pointer, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) { return *blocks = 2, CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream stream, void**, void**) {
  return machine::launch(function, stream, nullptr), CUDA_SUCCESS;
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream stream, void**) {
  return machine::launch(function, stream, nullptr), CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return machine::launch(function, config->hStream, nullptr), CUDA_SUCCESS;
}
CUresult cuGetProcAddress(const char* name, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  *found = dlsym(RTLD_DEFAULT, name);
  for (const char* suffix : {"_v2", "_v3"})
    if (!*found) *found = dlsym(RTLD_DEFAULT, (std::string(name) + suffix).c_str());
  if (!*found) *found = reinterpret_cast<void*>(nothing);
  if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  cuGetProcAddress(name, found, 0, 0, nullptr);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
