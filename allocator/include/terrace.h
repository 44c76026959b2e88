/*
 * terrace.h: record a forward once, plan it, replay it against one reservation.
 *
 *     terrace_device *device;
 *     if (terrace_create_cuda(0, 20ULL << 30, &device) != TERRACE_OK) {
 *         fprintf(stderr, "%s\n", terrace_last_error());
 *         exit(1);
 *     }
 *     for (each forward) {
 *         terrace_begin_step(device, "prefill/4128", 12, stream);
 *         terrace_alloc(device, bytes, stream, "attention.q", &q);
 *         ...
 *         terrace_free(device, q);
 *         terrace_end_step(device);
 *     }
 *     terrace_destroy(device);
 *
 * The first step of a key is recorded and planned; from the second on, requests are answered from the plan, at the same
 * addresses each time. A step that differs is served all the same, safely, and counted.
 *
 * Units      Every size is in bytes. A request is rounded up to the device's alignment.
 * Streams    A stream is its cudaStream_t or CUstream, passed as a void pointer; NULL is the default stream. On host memory
 *            streams are names only.
 * Errors     Every call that can fail returns a status. The text of the last failure of the calling thread is in
 *            terrace_last_error(); a call that succeeds leaves it as it was. An argument that is null, misaligned or out of
 *            range is TERRACE_BAD_ARGUMENT, and the text names it. After a failure, pointers in `out` arguments are NULL.
 * Threads    Every function may be called from any thread. One lock per device guards its state. A step belongs to the
 *            thread that began it, and a step that another thread begins meanwhile is served outside the plan; frees may
 *            come from any thread.
 * Lifetime   A device lives from terrace_create to terrace_destroy, and so does all memory that it gave out: destroying it
 *            with live buffers takes them away. No call may be under way, or follow, when a device is destroyed.
 * Fork       In a child of fork() every call on a parent's device is TERRACE_FORKED and touches nothing. Open a device after
 *            fork().
 * Panics     A bug in the library ends neither the process nor the calling thread: the call returns TERRACE_PANIC, and the
 *            device is dead. Every later call on it is TERRACE_PANIC too, but for terrace_destroy. What it had given out
 *            stays valid until then.
 * Exceptions Only the functions of terrace_torch_* that say so throw; none of the others may be made to, by a callback.
 */
#ifndef TERRACE_H
#define TERRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. A library of the same TERRACE_VERSION_MAJOR, and MINOR while MAJOR is 0, serves it. */
#define TERRACE_VERSION_MAJOR 0
#define TERRACE_VERSION_MINOR 1
#define TERRACE_VERSION_PATCH 0
#define TERRACE_VERSION ((TERRACE_VERSION_MAJOR << 16) | (TERRACE_VERSION_MINOR << 8) | TERRACE_VERSION_PATCH)

/* The version of the library, to compare with TERRACE_VERSION. */
uint32_t terrace_version(void);

/* ---- Statuses ---------------------------------------------------------------------------------------------------- */

typedef enum terrace_status {
    TERRACE_OK = 0,
    /* The budget is spent, after everything that could be freed was; or the device has less free than was to be reserved.
     * The text is a report: who asked for how much, where the bytes are, the largest plans and live buffers. */
    TERRACE_OUT_OF_MEMORY = 1,
    /* An argument is wrong; the text names it. */
    TERRACE_BAD_ARGUMENT = 2,
    /* There is no libcuda, or no such device. */
    TERRACE_NO_DEVICE = 3,
    /* The library was built without CUDA. */
    TERRACE_NOT_BUILT = 4,
    /* The driver refused; the text says what. */
    TERRACE_DRIVER = 5,
    /* Only possible between steps, and one is open. */
    TERRACE_STEP_OPEN = 6,
    /* terrace_end_step without a step of this thread. Counted; nothing else happened. */
    TERRACE_NO_STEP = 7,
    /* That pool was never begun, or is not being captured. */
    TERRACE_NO_SUCH_POOL = 8,
    /* Nothing that lives begins at that pointer: freed twice, or never from here. Counted; nothing else happened. */
    TERRACE_NOT_LIVE = 9,
    /* Only possible with nothing in the reservation, and something lives or is pinned. */
    TERRACE_NOT_EMPTY = 10,
    /* This process is a fork of the one that opened the device. */
    TERRACE_FORKED = 11,
    /* The library panicked, now or earlier; the device is dead. */
    TERRACE_PANIC = 12,
    /* Anything else; the text says what. Later versions may add statuses: treat an unknown one like this. */
    TERRACE_OTHER = 13
} terrace_status;

/* The name of a status, such as "TERRACE_OK". Static. */
const char *terrace_status_name(terrace_status status);

/* The text of the calling thread's last failure, without a line end; "" before the first. Valid until the thread's next
 * failure, or its end. */
const char *terrace_last_error(void);

/* ---- Devices ----------------------------------------------------------------------------------------------------- */

/* One device: one reservation, made when it is created, and everything that is served from it. */
typedef struct terrace_device terrace_device;

/* Memory of this process: where there is no GPU. Pages cost nothing until they are touched. */
#define TERRACE_HOST 1u
/* A CUDA device, through libcuda. */
#define TERRACE_CUDA 2u

/* What a device is opened with. Begin with TERRACE_OPTIONS_INIT. 0 is the default but for size, budget and backing. Later
 * versions add fields at the end; an older library refuses those that are not 0. */
typedef struct terrace_options {
    uint64_t size;      /* sizeof(terrace_options) */
    uint64_t budget;    /* the one reservation: a hard limit on everything served */
    uint64_t align;     /* what requests are rounded up to, and so aligned to: a power of two up to 4096; default 512 */
    uint32_t backing;   /* TERRACE_HOST or TERRACE_CUDA */
    uint32_t ordinal;   /* which CUDA device, from 0 */
    uint32_t debug;     /* not 0: redzones around each buffer, poison on free; slow. align is then at most 512 */
    uint32_t patience;  /* steps in a row that may differ by more than half before a key is given up; default 4 */
    uint32_t most_keys; /* most keys with a plan; the one unused for longest makes room; default 256 */
    uint32_t reserved;  /* 0 */
} terrace_options;

#define TERRACE_OPTIONS_INIT { sizeof(terrace_options), 0, 0, 0, 0, 0, 0, 0, 0 }

/* Opens a device and makes its reservation. *out is NULL on failure. */
terrace_status terrace_create(const terrace_options *options, terrace_device **out);
terrace_status terrace_create_host(uint64_t budget, terrace_device **out);
terrace_status terrace_create_cuda(uint32_t ordinal, uint64_t budget, terrace_device **out);

/* Gives the reservation back. NULL is nothing. Work that is queued on a CUDA device is waited for. */
terrace_status terrace_destroy(terrace_device *device);

/* Where the reservation lies. */
terrace_status terrace_reservation(terrace_device *device, void **base, uint64_t *bytes);

/* Replaces the reservation by one of that size: between steps, and with nothing in it. Waits for all queued work. Plans stay;
 * those that need more are not used. If the new size is not to be had, the old one is back. */
terrace_status terrace_resize(terrace_device *device, uint64_t budget);

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

/* Begins a step: a forward of the kind that the `length` bytes of `key` name, such as its phase and its padded tokens. Keys
 * are compared in full. If the last step ended on another stream, this stream waits for it; the host does not. A begin on
 * the thread whose step is open is nested: only the outermost pair counts. */
terrace_status terrace_begin_step(terrace_device *device, const void *key, size_t length, void *stream);

/* Ends the step that this thread began. Planning happens here, after the first step of a key and after one that differed. */
terrace_status terrace_end_step(terrace_device *device);

/* ---- Buffers ----------------------------------------------------------------------------------------------------- */

/* Serves a request. `label` says who asks, for reports; it may be NULL, and is copied. *out is NULL for 0 bytes, and on
 * failure. The memory may be used by work on `stream`, and on others that are ordered after it. */
terrace_status terrace_alloc(terrace_device *device, uint64_t bytes, void *stream, const char *label, void **out);

/* Frees, in the order of the stream that the buffer was asked for on: work queued there before may still use it. NULL is
 * nothing. */
terrace_status terrace_free(terrace_device *device, void *ptr);

/* Says that another stream uses a buffer: after its free, the bytes are given out again only once all that was queued on
 * that stream by then is done. */
terrace_status terrace_record_stream(terrace_device *device, void *ptr, void *stream);

/* Gives back what was freed on several streams and is done by now; with `wait` not 0, waits for all of it. A request that
 * finds no room does both by itself. */
terrace_status terrace_drain(terrace_device *device, int wait);

/* Called when a request finds no room, before anything is waited for, with the bytes asked for. Return not 0 if something was
 * freed: the request is tried again, and this is called again if there still is no room. Once it returns 0, buffers that
 * were freed on several streams are waited for, and then the request fails. It runs on the thread whose request it is, on
 * several at once perhaps, and without the lock: it may call terrace_free and terrace_alloc on the same device, whose own
 * failures do not call it. It must not throw. */
typedef int (*terrace_failure_callback)(void *user, uint64_t bytes);

/* Sets the device's callback; NULL for none. The one before may still be running on another thread. */
terrace_status terrace_on_failure(terrace_device *device, terrace_failure_callback callback, void *user);

/* ---- Graph pools ------------------------------------------------------------------------------------------------- */

/* The id of a pool, as CUDA graphs have it. */
typedef struct terrace_pool {
    uint64_t first;
    uint64_t second;
} terrace_pool;

/* A capture begins: requests on these `count` streams, or on all if count is 0, belong to the pool, whose memory is pinned:
 * never given to anybody else until the pool is released and nothing in it lives. Captures that share a pool run one at a
 * time, and a later one reuses what an earlier one freed. */
terrace_status terrace_begin_pool(terrace_device *device, terrace_pool pool, void *const *streams, size_t count);

/* The capture ends; the pool stays pinned. */
terrace_status terrace_end_pool(terrace_device *device, terrace_pool pool);

/* No graph uses the pool any more. Once for a pool, however many captures it had. */
terrace_status terrace_release_pool(terrace_device *device, terrace_pool pool);

/* ---- Figures ----------------------------------------------------------------------------------------------------- */

/* Bytes to set aside for steps before anything else is sized: the largest plan, what steps leave behind, and what is
 * pinned. */
terrace_status terrace_required_bytes(terrace_device *device, uint64_t *out);

/* The most that any plan so far needed. */
terrace_status terrace_arena_bytes(terrace_device *device, uint64_t *out);

/* The figures since the device was opened, as one JSON object, as snprintf writes: at most `capacity` bytes with the null
 * byte go to `buffer`, and the length of the whole, without the null byte, to *length. A text that was cut is TERRACE_OK;
 * compare *length with capacity. `buffer` may be NULL if capacity is 0. */
terrace_status terrace_stats_json(terrace_device *device, char *buffer, size_t capacity, size_t *length);

/* ---- PyTorch ----------------------------------------------------------------------------------------------------- */
/*
 * The functions that torch.cuda.memory.CUDAPluggableAllocator takes, by CUDA ordinal. They need no CUDA headers: `stream` is
 * a cudaStream_t.
 *
 *     pluggable = torch.cuda.memory.CUDAPluggableAllocator(path, "terrace_torch_malloc", "terrace_torch_free")
 *     address = lambda name: ctypes.cast(getattr(ctypes.CDLL(path), name), ctypes.c_void_p).value
 *     pluggable._allocator.set_record_stream_fn(address("terrace_torch_record_stream"))    (and the other hooks)
 *     torch.cuda.memory.change_current_allocator(pluggable)
 *
 * A device that nobody registered is opened at the first request, from the environment:
 *     TERRACE_BACKING   cuda (default) or host
 *     TERRACE_BUDGET    bytes, or with a unit of KiB, MiB, GiB or TiB, such as 20GiB; needed unless a fraction is set
 * Devices in use by PyTorch are never closed: frees come until the process is gone.
 *
 * "Throws" means std::runtime_error of the libstdc++ that the process has loaded, which PyTorch turns into a RuntimeError; a
 * null pointer it would take for memory. Without a libstdc++ in the process, the text is printed and the process aborted.
 */

/* Makes `device` the one of an ordinal (0 to 63), before its first use. It stays so until the process ends; terrace_destroy
 * then gives up the caller's hold only. */
terrace_status terrace_torch_register(int ordinal, terrace_device *device);

/* The device of an ordinal, opened if need be, for steps and figures. Not to be destroyed. */
terrace_status terrace_torch_device(int ordinal, terrace_device **out);

/* alloc_fn. NULL for 0 bytes only. Throws; if the budget is spent, a text that begins with "CUDA out of memory". */
void *terrace_torch_malloc(size_t size, int device, void *stream);

/* alloc_fn of a torch.cuda.MemPool. PyTorch's own allocator asks for segments there, and takes NULL for a refusal, which it raises as
 * its own. Never throws; terrace_last_error() has the report. */
void *terrace_torch_try_malloc(size_t size, int device, void *stream);

/* Throws an exception of its own with that text, such as the c10::OutOfMemoryError of the PyTorch that it was compiled against. One
 * that returns has thrown nothing. */
typedef void (*terrace_torch_thrower)(const char *text);

/* Sets who throws when a budget is spent; NULL for nobody, and std::runtime_error. */
void terrace_torch_on_out_of_memory(terrace_torch_thrower thrower);

/* free_fn. Any pointer, from any thread, at any time, also at exit: what is not live is counted. Never throws. */
void terrace_torch_free(void *ptr, size_t size, int device, void *stream);

/* set_init_fn. Opens nothing; throws if the environment is malformed. */
void terrace_torch_init(int devices);

/* set_reset_fn, which torch.cuda.empty_cache() calls: terrace_drain without waiting, on all devices. Never throws. */
void terrace_torch_reset(void);

/* set_memory_fraction_fn. Limits a device that is opened later to this share of its memory, and to TERRACE_BUDGET if that is
 * set and less. Throws if the device is open and has reserved more: a reservation does not shrink. */
void terrace_torch_memory_fraction(double fraction, int device);

/* set_base_alloc_fn. The reservation that a pointer lies in, and its size; NULL and 0 for other pointers. The memory is
 * mapped by the driver's virtual memory calls, so cudaIpcGetMemHandle refuses it. Never throws. */
void *terrace_torch_base_alloc(void *ptr, size_t *size);

/* set_record_stream_fn. Without it, Tensor.record_stream does nothing, silently. Never throws. */
void terrace_torch_record_stream(void *ptr, void *stream);

/* set_begin_allocate_to_pool. In C++: (int, std::pair<uint64_t, uint64_t>, std::function<bool(cudaStream_t)>); a pair of two
 * numbers is passed as this struct, and a function by value as a pointer to it. The function is not asked: until the end,
 * all requests for the device go to the pool, which pins more than needed and never less. Throws. */
void terrace_torch_begin_allocate_to_pool(int device, terrace_pool pool, const void *filter);

/* set_end_allocate_to_pool_fn. Never throws. */
void terrace_torch_end_allocate_to_pool(int device, terrace_pool pool);

/* set_release_pool. Each graph that was captured into a pool releases it once; the last one counts. Never throws. */
void terrace_torch_release_pool(int device, terrace_pool pool);

#ifdef __cplusplus
}
#endif

#endif
