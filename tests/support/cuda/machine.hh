// What the parts of the stand-in share: GPUs that have memory, streams, events and a log, but compute nothing.
//
// A stream runs what it is given in order, as CUDA's do: a copy behind a receive waits for it, and the host does not.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace machine {

// A line of this process' log, $STANDIN_LOG.<pid>; nothing without that variable.
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool logs();

// A step of a stream's work. It returns whether it has ended; else it is asked again, and what comes after it waits.
using Step = std::function<bool()>;
void submit(cudaStream_t stream, Step step);

// Until a stream has nothing left to do; the host's wait is logged by who calls this.
void finish(cudaStream_t stream);
void finish_all();

// Of kernels, by the address that stands for one.
void name_kernel(const void* kernel, const char* mangled);
void launch(const void* kernel, cudaStream_t stream, void** arguments);

void* unique();  // a handle that no other has
// Fills with a number of so many bytes. Zeros cost no memory, and what is large stays as it was.
void fill(void* to, const void* value, size_t size, size_t count);

int device();
int devices();
}  // namespace machine
