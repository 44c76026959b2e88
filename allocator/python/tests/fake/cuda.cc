// CUDA without a GPU, for tests: preloaded, it shows PyTorch two devices whose memory is this process's.
// What PyTorch does around an allocator then runs for real: its initialisation, requests, streams, events, graph capture, copies,
// errors. So does the allocator's own CUDA backing. Kernels are the one thing that does not run: a launch does nothing, so values on
// these devices mean nothing unless they were copied. Every stream is done at once, and a captured graph is an empty object.
//
//     g++ -shared -fPIC -Wl,-soname,libcuda.so.1 -I HEADERS *.cc -o libcuda.so.1      (conftest.py does it)
//     LD_PRELOAD=./libcuda.so.1 python ...
//
// This file is the runtime, which PyTorch calls; driver.cc the driver, which the allocator calls; blas.cc some of cuBLAS. The headers are those of the wheels
// nvidia-cuda-runtime and nvidia-cuda-crt.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "fake.h"

namespace {

thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;
std::mutex lock;
// Device memory and its size, by address.
std::map<void *, size_t> memory[DEVICES];
std::map<cudaStream_t, bool> capturing;

cudaError_t said(cudaError_t error) {
    if (error != cudaSuccess) last = error;
    return error;
}

}  // namespace

std::atomic<size_t> taken[DEVICES];
std::atomic<unsigned long> requests;

bool fake_is_capturing(void *stream) {
    const std::lock_guard<std::mutex> guard(lock);
    return capturing.count(static_cast<cudaStream_t>(stream)) != 0;
}

extern "C" {

// How often memory was asked for so far.
unsigned long fake_cuda_mallocs() { return requests; }
// Bytes of a device in use.
size_t fake_cuda_in_use(int device) { return taken[device]; }

cudaError_t cudaGetDeviceCount(int *count) { return *count = DEVICES, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return said(cudaErrorInvalidDevice);
    return current = device, cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    std::memset(properties, 0, sizeof *properties);
    std::strcpy(properties->name, "no device at all");
    properties->totalGlobalMem = MEMORY;
    properties->major = 9;
    properties->minor = 0;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    for (int i = 0; i < 3; i++) properties->maxGridSize[i] = 65535, properties->maxThreadsDim[i] = 1024;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) { return *value = 0, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetLastError() {
    const cudaError_t error = last;
    return last = cudaSuccess, error;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "an error"; }
const char *cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheFake"; }

cudaError_t cudaMalloc(void **at, size_t size) {
    requests++;
    const std::lock_guard<std::mutex> guard(lock);
    if (taken[current] + size > MEMORY) return *at = nullptr, said(cudaErrorMemoryAllocation);
    // Aligned as the driver's; pages that nobody touches cost nothing.
    if (posix_memalign(at, 512, size) != 0) return said(cudaErrorMemoryAllocation);
    taken[current] += size;
    memory[current][*at] = size;
    return cudaSuccess;
}
cudaError_t cudaFree(void *at) {
    const std::lock_guard<std::mutex> guard(lock);
    for (int device = 0; device < DEVICES; device++) {
        const auto found = memory[device].find(at);
        if (found == memory[device].end()) continue;
        taken[device] -= found->second;
        memory[device].erase(found);
        std::free(at);
        return cudaSuccess;
    }
    return at == nullptr ? cudaSuccess : said(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { return *free = MEMORY - taken[current], *total = MEMORY, cudaSuccess; }
cudaError_t cudaHostAlloc(void **at, size_t size, unsigned) { return posix_memalign(at, 512, size), cudaSuccess; }
cudaError_t cudaFreeHost(void *at) { return std::free(at), cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *at) {
    std::memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void *>(at);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) { return std::memmove(to, from, size), cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t) {
    return std::memmove(to, from, size), cudaSuccess;
}
cudaError_t cudaMemset(void *at, int byte, size_t size) { return std::memset(at, byte, size), cudaSuccess; }
cudaError_t cudaMemsetAsync(void *at, int byte, size_t size, cudaStream_t) { return std::memset(at, byte, size), cudaSuccess; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { return made(stream), cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return made(stream), cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return made(event), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return made(event), cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    const std::lock_guard<std::mutex> guard(lock);
    return capturing[stream] = true, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    const std::lock_guard<std::mutex> guard(lock);
    capturing.erase(stream);
    return made(graph), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    *status = fake_is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id != nullptr) *id = *status == cudaStreamCaptureStatusActive ? 7 : 0;
    if (graph != nullptr) *graph = nullptr;
    if (nodes != nullptr) *nodes = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *graph, cudaGraph_t, unsigned long long) { return made(graph), cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *) { return made(kernel), cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    std::memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
    return *blocks = 1, cudaSuccess;
}

}  // extern "C"
