// The driver's half of the imagined CUDA: what terrace-allocator calls by name, and what PyTorch looks at. It is written against the ABI
// of the functions and includes no header of theirs, whose macros would rename them. What is not here is not called without a GPU.

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "fake.h"

namespace {

using Result = int;
using Device = int;
using Address = std::uint64_t;
constexpr Result SUCCESS = 0, OUT_OF_MEMORY = 2;
constexpr size_t GRANULARITY = size_t{2} << 20;

thread_local void *context = nullptr;
std::mutex lock;
// Mapped bytes and their device, by address; the device and size of each handle.
std::map<Address, std::pair<Device, size_t>> mapped;
std::map<unsigned long long, std::pair<Device, size_t>> handles;
unsigned long long newest = 0;

void *context_of(Device device) { return reinterpret_cast<void *>(static_cast<std::uintptr_t>(0xC0DE00 + device)); }
Device device_of(void *of) { return of == nullptr ? 0 : static_cast<Device>(reinterpret_cast<std::uintptr_t>(of) - 0xC0DE00); }

}  // namespace

extern "C" {

Result cuInit(unsigned) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
Result cuGetErrorName(Result, const char **text) { return *text = "CUDA_ERROR_OF_THE_FAKE", SUCCESS; }
Result cuGetErrorString(Result error, const char **text) { return *text = error == OUT_OF_MEMORY ? "out of memory" : "an error", SUCCESS; }
Result cuDeviceGetCount(int *count) { return *count = DEVICES, SUCCESS; }
Result cuDeviceGet(Device *device, int ordinal) { return *device = ordinal, SUCCESS; }
Result cuDeviceGetName(char *name, int size, Device) { return std::strncpy(name, "no device at all", size), SUCCESS; }
Result cuDeviceTotalMem_v2(size_t *bytes, Device) { return *bytes = MEMORY, SUCCESS; }
Result cuDeviceGetAttribute(int *value, int, Device) { return *value = 0, SUCCESS; }

Result cuDevicePrimaryCtxRetain(void **made, Device device) { return *made = context_of(device), SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(Device) { return SUCCESS; }
Result cuDevicePrimaryCtxGetState(Device, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
Result cuCtxGetCurrent(void **current) { return *current = context, SUCCESS; }
Result cuCtxSetCurrent(void *next) { return context = next, SUCCESS; }
Result cuCtxPushCurrent_v2(void *next) { return context = next, SUCCESS; }
Result cuCtxPopCurrent_v2(void **old) { return *old = context, SUCCESS; }
Result cuCtxSynchronize() { return SUCCESS; }

Result cuMemGetInfo_v2(size_t *free, size_t *total) {
    return *free = MEMORY - taken[device_of(context)], *total = MEMORY, SUCCESS;
}
Result cuMemGetAllocationGranularity(size_t *granularity, const void *, int) { return *granularity = GRANULARITY, SUCCESS; }
Result cuMemAddressReserve(Address *base, size_t size, size_t, Address, unsigned long long) {
    void *at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    return *base = reinterpret_cast<Address>(at), SUCCESS;
}
Result cuMemAddressFree(Address base, size_t size) { return munmap(reinterpret_cast<void *>(base), size), SUCCESS; }
Result cuMemCreate(unsigned long long *handle, size_t size, const void *, unsigned long long) {
    const std::lock_guard<std::mutex> guard(lock);
    requests++;
    const Device device = device_of(context);
    if (taken[device] + size > MEMORY) return OUT_OF_MEMORY;
    taken[device] += size;
    handles[*handle = ++newest] = {device, size};
    return SUCCESS;
}
Result cuMemMap(Address at, size_t size, size_t, unsigned long long handle, unsigned long long) {
    const std::lock_guard<std::mutex> guard(lock);
    mapped[at] = handles[handle];
    return mprotect(reinterpret_cast<void *>(at), size, PROT_READ | PROT_WRITE) == 0 ? SUCCESS : OUT_OF_MEMORY;
}
// The mapping keeps the memory.
Result cuMemRelease(unsigned long long) { return SUCCESS; }
Result cuMemSetAccess(Address, size_t, const void *, size_t) { return SUCCESS; }
Result cuMemUnmap(Address at, size_t size) {
    const std::lock_guard<std::mutex> guard(lock);
    const auto [device, bytes] = mapped[at];
    taken[device] -= bytes;
    mapped.erase(at);
    return mprotect(reinterpret_cast<void *>(at), size, PROT_NONE), SUCCESS;
}
Result cuMemsetD8Async(Address at, unsigned char byte, size_t size, void *) {
    return std::memset(reinterpret_cast<void *>(at), byte, size), SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *) {
    return std::memcpy(to, reinterpret_cast<void *>(from), size), SUCCESS;
}

Result cuThreadExchangeStreamCaptureMode(int *) { return SUCCESS; }
Result cuStreamIsCapturing(void *stream, int *status) { return *status = fake_is_capturing(stream), SUCCESS; }
Result cuStreamSynchronize(void *) { return SUCCESS; }
Result cuStreamWaitEvent(void *, void *, unsigned) { return SUCCESS; }
Result cuEventCreate(void **event, unsigned) { return made(event), SUCCESS; }
Result cuEventRecord(void *, void *) { return SUCCESS; }
Result cuEventQuery(void *) { return SUCCESS; }
Result cuEventSynchronize(void *) { return SUCCESS; }
Result cuEventDestroy_v2(void *) { return SUCCESS; }

}  // extern "C"
