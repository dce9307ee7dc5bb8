// The log, streams, events and memory.
#include "machine.hh"

#include <cuda.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr size_t GIB = size_t(1) << 30, MEMORY = 80 * GIB, TAKEN = 2 * GIB;

std::recursive_mutex guard;  // of all below; a step may log or free
std::condition_variable_any changed;
thread_local int current = 0;

int number(const char* variable, int otherwise) {
  const char* text = getenv(variable);
  return text ? atoi(text) : otherwise;
}

struct Stream {
  std::deque<machine::Step> steps;
};

struct Event {
  uint64_t recorded = 0, passed = 0;  // how often
  int64_t ns = 0;
};

struct Block {
  size_t size;
  bool on_host;
  int device;
};

// Never destroyed: torch's threads still call while a process ends.
std::map<void*, Stream>& streams = *new std::map<void*, Stream>;
std::map<const char*, Block>& blocks = *new std::map<const char*, Block>;
size_t in_use[64];

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

Stream& of(cudaStream_t stream) {  // each GPU has a default stream of its own
  void* key = reinterpret_cast<uintptr_t>(stream) > 2 ? stream : reinterpret_cast<void*>(uintptr_t(current) + 8);
  return streams[key];
}

// Runs whatever can run; whether something is left.
bool progress() {
  bool moved = true, left = true;
  while (moved) {
    moved = left = false;
    for (auto& [_, stream] : streams) {
      while (!stream.steps.empty() && stream.steps.front()()) {
        stream.steps.pop_front();
        moved = true;
      }
      left = left || !stream.steps.empty();
    }
  }
  return left;
}

void watch() {
  std::unique_lock<std::recursive_mutex> lock(guard);
  while (true) {
    bool left = progress();
    changed.notify_all();
    if (left)
      changed.wait_for(lock, std::chrono::microseconds(200));
    else
      changed.wait(lock);
  }
}

void wait_until(const std::function<bool()>& done) {
  std::unique_lock<std::recursive_mutex> lock(guard);
  progress();
  while (!done()) changed.wait_for(lock, std::chrono::microseconds(200)), progress();
}

const Block* block_of(const void* pointer) {
  auto next = blocks.upper_bound(static_cast<const char*>(pointer));
  if (next == blocks.begin()) return nullptr;
  auto& [start, block] = *--next;
  return static_cast<const char*>(pointer) < start + block.size ? &block : nullptr;
}

void* take(size_t size, bool on_host) {
  void* found = mmap(nullptr, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  blocks[static_cast<char*>(found)] = {size, on_host, current};
  if (!on_host) in_use[current] += size;
  return found;
}

void give(void* pointer) {
  auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return;
  if (!found->second.on_host) in_use[found->second.device] -= found->second.size;
  munmap(pointer, found->second.size ? found->second.size : 1);
  blocks.erase(found);
}

cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t stream) {
  std::unique_lock<std::recursive_mutex> lock(guard);
  const Block *target = block_of(to), *source = block_of(from);
  bool to_host = !target || target->on_host, from_host = !source || source->on_host;
  const char* way = to_host ? (from_host ? "host-host" : "gpu-host") : from_host ? "host-gpu" : "gpu-gpu";
  machine::log("C %d %p %zu %s%s", current, stream, size, way, target && source ? "" : " pageable");
  if (!source && !of(stream).steps.empty()) {  // CUDA has read pageable memory when it returns
    auto kept = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + size);
    machine::submit(stream, [=] { return memcpy(to, kept->data(), size), true; });
  } else {
    machine::submit(stream, [=] { return memmove(to, from, size), true; });
  }
  lock.unlock();
  if (!target) machine::finish(stream);  // and has written it
  return cudaSuccess;
}

cudaError_t record(cudaEvent_t event, cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  Event* own = reinterpret_cast<Event*>(event);
  machine::log("R %d %p %p", current, stream, event);
  uint64_t turn = ++own->recorded;
  machine::submit(stream, [=] { return own->passed = turn, own->ns = now(), true; });
  return cudaSuccess;
}

cudaError_t make_event(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t make_stream(cudaStream_t* stream, int priority) {
  *stream = static_cast<cudaStream_t>(machine::unique());
  machine::log("T %d %p priority %d", current, *stream, priority);
  return cudaSuccess;
}

}  // namespace

namespace machine {

bool logs() {
  static const bool on = getenv("STANDIN_LOG");
  return on;
}

void log(const char* format, ...) {
  if (!logs()) return;
  std::lock_guard<std::recursive_mutex> lock(guard);
  static FILE* file;
  static int owner;
  if (owner != getpid()) {  // a forked rank has a log of its own
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", getenv("STANDIN_LOG"), owner = getpid());
    file = fopen(path, "w");
    setvbuf(file, nullptr, _IOLBF, 1 << 16);  // a rank may end at any moment
  }
  va_list values;
  va_start(values, format);
  vfprintf(file, format, values);
  va_end(values);
  fputc('\n', file);
}

void submit(cudaStream_t stream, Step step) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  Stream& own = of(stream);
  if (own.steps.empty() && step()) return;
  own.steps.push_back(std::move(step));
  static int watched;
  if (watched != getpid()) watched = getpid(), std::thread(watch).detach();
  changed.notify_all();
}

void finish(cudaStream_t stream) {
  Stream& own = (std::lock_guard<std::recursive_mutex>(guard), of(stream));
  wait_until([&] { return own.steps.empty(); });
}

void finish_all() { wait_until([] { return !progress(); }); }

void* unique() {
  static std::atomic<uintptr_t> last{0x1000};
  return reinterpret_cast<void*>(last += 16);
}

void fill(void* to, const void* value, size_t size, size_t count) {
  constexpr size_t PAGE = 4096, LARGE = 16 << 20;
  char *first = static_cast<char*>(to), *end = first + size * count;
  if (std::all_of(static_cast<const char*>(value), static_cast<const char*>(value) + size, [](char one) { return !one; })) {
    char* inner = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(first) + PAGE - 1) / PAGE * PAGE);
    char* outer = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / PAGE * PAGE);
    if (inner >= outer) return memset(first, 0, end - first), void();
    memset(first, 0, inner - first), memset(outer, 0, end - outer);
    madvise(inner, outer - inner, MADV_DONTNEED);  // such pages read as zeros
  } else if (size * count <= LARGE) {
    for (; first < end; first += size) memcpy(first, value, size);
  }
}

int device() { return current; }
int devices() { return number("STANDIN_GPUS", 1); }

}  // namespace machine

extern "C" {

void standin_mark(const char* text) { machine::log("# %s", text); }

// Devices.
cudaError_t cudaGetDeviceCount(int* count) { return *count = machine::devices(), cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= machine::devices()) return cudaErrorInvalidDevice;
  return current = device, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 163 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  *found = {};
  strcpy(found->name, "NVIDIA A100-SXM4-80GB");
  found->totalGlobalMem = MEMORY;
  found->major = 8, found->warpSize = 32, found->multiProcessorCount = 108;
  found->sharedMemPerBlock = 48 << 10, found->sharedMemPerBlockOptin = 163 << 10;
  found->sharedMemPerMultiprocessor = 164 << 10, found->l2CacheSize = 40 << 20;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536, found->memPitch = 1u << 31, found->textureAlignment = 512;
  found->maxThreadsPerBlock = 1024, found->maxThreadsPerMultiProcessor = 2048;
  for (int axis = 0; axis < 3; axis++) {
    found->maxThreadsDim[axis] = axis == 2 ? 64 : 1024;
    found->maxGridSize[axis] = axis ? 65535 : 2147483647;
  }
  found->unifiedAddressing = found->managedMemory = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  return snprintf(text, size, "0000:%02x:00.0", device + 1), cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  machine::log("S %d cudaDeviceSynchronize", current);
  return machine::finish_all(), cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    default: return "refused by the stand-in for CUDA";
  }
}

// Memory: the host's, at no cost until it is written.
cudaError_t cudaMalloc(void** pointer, size_t size) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  machine::log("M %d %zu", current, size);
  if (in_use[current] + size > MEMORY - TAKEN) return cudaErrorMemoryAllocation;
  return *pointer = take(size, false), cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  machine::log("F %d", current);
  machine::finish_all();  // as CUDA does
  std::lock_guard<std::recursive_mutex> lock(guard);
  return give(pointer), cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  machine::log("H %zu", size);
  return *pointer = take(size, true), cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  machine::finish_all();
  std::lock_guard<std::recursive_mutex> lock(guard);
  return give(pointer), cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  return *free = MEMORY - TAKEN - in_use[current], *total = MEMORY, cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  const Block* block = block_of(pointer);
  *found = {};
  found->type = !block ? cudaMemoryTypeUnregistered : block->on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  if (block) found->device = block->device, found->devicePointer = found->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, size, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return copy(to, from, size, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  machine::log("S %d cudaMemcpy", current);
  copy(to, from, size, nullptr);
  return machine::finish(nullptr), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  machine::log("Z %d %p %zu", current, stream, size);
  machine::submit(stream, [=, byte = char(value)] { return machine::fill(to, &byte, 1, size), true; });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }

// Streams.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) { return make_stream(stream, priority); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make_stream(stream, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make_stream(stream, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id) *id = 0;
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  progress();
  return of(stream).steps.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  machine::log("S %d cudaStreamSynchronize %p", current, stream);
  return machine::finish(stream), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  Event* own = reinterpret_cast<Event*>(event);
  machine::log("W %d %p %p", current, stream, event);
  machine::submit(stream, [=, turn = own->recorded] { return own->passed >= turn; });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  machine::submit(stream, [=] { return call(data), true; });
  return cudaSuccess;
}

// Events. None is freed: another stream's step may still look at it.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make_event(event); }
#undef cudaEventCreate
cudaError_t cudaEventCreate(cudaEvent_t* event) { return make_event(event); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return record(event, stream); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return record(event, stream); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  progress();
  Event* own = reinterpret_cast<Event*>(event);
  return own->passed == own->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  machine::log("S %d cudaEventSynchronize %p", current, event);
  Event* own = reinterpret_cast<Event*>(event);
  wait_until([=] { return own->passed == own->recorded; });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t last) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  for (cudaEvent_t event : {first, last}) {
    Event* own = reinterpret_cast<Event*>(event);
    if (!own->recorded) return cudaErrorInvalidResourceHandle;
    if (own->passed != own->recorded) return cudaErrorNotReady;
  }
  *ms = (reinterpret_cast<Event*>(last)->ns - reinterpret_cast<Event*>(first)->ns) / 1e6f;
  return cudaSuccess;
}

}  // extern "C"
