/*
 * terrace_gdn.h: Gated DeltaNet, prefill in windows of bounded memory and the decode step, on raw pointers.
 *
 *     terrace_gdn_prefill_args args = TERRACE_GDN_PREFILL_INIT;
 *     args.device.kind = TERRACE_GDN_CUDA;
 *     args.device.stream = stream;
 *     args.tokens = 4128, args.key_heads = 16, args.value_heads = 48;
 *     args.q.data = q, args.q.dtype = TERRACE_GDN_BF16;                      and k, v, g, beta, o
 *     terrace_gdn_workspace_bytes(&args.device, 16, 48, 0, 0, &args.workspace_bytes);
 *     args.workspace = ...;                                                  aligned to 256 bytes
 *     if (terrace_gdn_prefill(&args, NULL) != TERRACE_GDN_OK) fprintf(stderr, "%s\n", terrace_gdn_last_error());
 *
 * With S the state of a value head, [V, K] from zeros or a pool, token by token:
 *
 *     S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = scale S q
 *
 * Shapes     q, k [tokens, key_heads, 128]; v, o [tokens, value_heads, 128]; g, beta [tokens, value_heads]. value_heads is a
 *            multiple of key_heads: value head h uses key head h / (value_heads / key_heads). Other head sizes are not served.
 * Types      q, k, v and o are bf16 or fp16, on the CPU also fp32, all the same. g and beta are fp32 or the type of q. States
 *            are fp32 or bf16, checkpoints fp32.
 * Strides    In elements, from a token to the next and from a head to the next; 0 is contiguous. The 128 elements of a head lie
 *            side by side. On CUDA, rows of q, k, v, o and states begin at multiples of 16 bytes.
 * Memory     Pointers are of the device's memory, those named `host` of the host's. Nothing is allocated on the device. The
 *            workspace may hold anything before, and holds nothing of use after.
 * Streams    On CUDA a call queues its work and returns: its memory stays as it is until the stream has run it. Host arrays are
 *            read before a call returns. Calls may be captured into a graph; kernels are compiled and loaded when a type is
 *            first used, or by terrace_gdn_prepare. On the CPU the work is done when a call returns.
 * Errors     Every call returns a status. The text of the calling thread's last failure is in terrace_gdn_last_error(): one
 *            sentence that names the argument, what was expected and what was given. Whatever is refused was refused before
 *            anything was written.
 * Threads    Every function may be called from any thread. No state is shared but compiled kernels.
 */
#ifndef TERRACE_GDN_H
#define TERRACE_GDN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. A library of the same major version, and minor while major is 0, serves it. */
#define TERRACE_GDN_VERSION_MAJOR 0
#define TERRACE_GDN_VERSION_MINOR 1
#define TERRACE_GDN_VERSION_PATCH 0
#define TERRACE_GDN_VERSION \
    ((TERRACE_GDN_VERSION_MAJOR << 16) | (TERRACE_GDN_VERSION_MINOR << 8) | TERRACE_GDN_VERSION_PATCH)

/* The version of the library, to compare with TERRACE_GDN_VERSION. */
uint32_t terrace_gdn_version(void);

typedef enum terrace_gdn_status {
    TERRACE_GDN_OK = 0,
    /* An argument is wrong; the text names it. */
    TERRACE_GDN_BAD_ARGUMENT = 1,
    /* There is no CUDA driver, no such device, or one that is too old. */
    TERRACE_GDN_NO_DEVICE = 2,
    /* There is no NVRTC to compile kernels with, and they were not compiled before. */
    TERRACE_GDN_NO_COMPILER = 3,
    /* A kernel was not compiled, or the driver refused a call; the text says what it said. */
    TERRACE_GDN_DRIVER = 4,
    /* The library was built without CUDA. */
    TERRACE_GDN_NOT_BUILT = 5,
    /* This process is a fork of the one that first used the device. */
    TERRACE_GDN_FORKED = 6,
    /* A bug in the library; the call did not end as it should. */
    TERRACE_GDN_PANIC = 7,
    /* Anything else. Later versions may add statuses: treat an unknown one like this. */
    TERRACE_GDN_OTHER = 8
} terrace_gdn_status;

/* The name of a status, such as "TERRACE_GDN_OK". Static. */
const char *terrace_gdn_status_name(terrace_gdn_status status);

/* The text of the calling thread's last failure; "" before the first. Valid until the thread's next failure, or its end. */
const char *terrace_gdn_last_error(void);

/* Element types. */
#define TERRACE_GDN_BF16 1u
#define TERRACE_GDN_FP16 2u
#define TERRACE_GDN_FP32 3u

/* Kinds of device. */
#define TERRACE_GDN_CPU 1u
#define TERRACE_GDN_CUDA 2u

/* Designs of the CUDA kernels. */
#define TERRACE_GDN_FUSED 0u
#define TERRACE_GDN_STAGED 1u

typedef struct terrace_gdn_device {
    uint32_t kind;    /* TERRACE_GDN_CPU or TERRACE_GDN_CUDA */
    uint32_t ordinal; /* which CUDA device, from 0; its primary context is used, as by the CUDA runtime */
    void *stream;     /* its cudaStream_t or CUstream; NULL is the default stream */
    uint32_t threads; /* most threads on the CPU; 0 is one. The workspace grows with them */
    uint32_t reserved;
} terrace_gdn_device;

typedef struct terrace_gdn_tensor {
    void *data;
    int64_t token_stride; /* 0 is contiguous */
    int64_t head_stride;  /* 0 is contiguous */
    uint32_t dtype;
    uint32_t reserved;
} terrace_gdn_tensor;

/* States [slots, value_heads, 128 (V), 128 (K)]. */
typedef struct terrace_gdn_pool {
    void *data; /* NULL is none */
    int64_t slots;
    int64_t slot_stride; /* in elements; 0 is contiguous */
    uint32_t dtype;
    uint32_t reserved;
} terrace_gdn_pool;

typedef struct terrace_gdn_prefill_args {
    uint64_t size; /* sizeof(terrace_gdn_prefill_args) */
    terrace_gdn_device device;
    int64_t tokens;
    uint32_t key_heads;
    uint32_t value_heads;
    terrace_gdn_tensor q, k, v;
    terrace_gdn_tensor g; /* natural logarithm of the decay, at most 0 */
    terrace_gdn_tensor beta;
    terrace_gdn_tensor o;

    /* Token bounds of the packed sequences, [sequences + 1], the first 0. NULL: all tokens are one sequence. */
    const int64_t *host_cu_seqlens;
    int64_t sequences;
    /* (sequence, chunk inside it) of each chunk of 64 tokens, [chunks, 2], and chunks before each sequence, [sequences + 1]:
     * compared with what host_cu_seqlens gives. NULL: not compared. */
    const int64_t *host_chunk_indices;
    int64_t chunks;
    const int64_t *host_chunk_offsets;

    /* States to start from, a slot for each sequence (NULL: slot n for sequence n), and which sequences have one: not 0 (NULL:
     * all). Without a pool every sequence starts from zeros. */
    terrace_gdn_pool initial;
    const int32_t *host_initial_slots;
    const uint8_t *host_has_initial;
    /* Where final states go; none twice in one slot. In place, `last` is also where they come from and `initial` is none. */
    terrace_gdn_pool last;
    const int32_t *host_last_slots;
    uint32_t in_place;
    /* A state to keep after every so many chunks of a sequence: fp32, floor(tokens / (64 every)) rows for each sequence in
     * order. 0: none. */
    uint32_t checkpoint_every;
    terrace_gdn_pool checkpoints;

    float scale;     /* 0 is 128^-0.5 */
    uint32_t l2norm; /* not 0: q and k are normalised here, and rounded to their type */
    uint32_t window; /* tokens at once, a multiple of 64 up to 4096; 0 is the default. It changes no bit of any result */
    uint32_t design; /* TERRACE_GDN_FUSED or TERRACE_GDN_STAGED; for CUDA */
    void *workspace; /* aligned to 256 bytes */
    uint64_t workspace_bytes;
} terrace_gdn_prefill_args;

/* All else is 0, which is the default where there is one. */
#ifdef __cplusplus
#define TERRACE_GDN_PREFILL_INIT terrace_gdn_prefill_args{sizeof(terrace_gdn_prefill_args)}
#define TERRACE_GDN_DECODE_INIT terrace_gdn_decode_args{sizeof(terrace_gdn_decode_args)}
#else
#define TERRACE_GDN_PREFILL_INIT { sizeof(terrace_gdn_prefill_args) }
#define TERRACE_GDN_DECODE_INIT { sizeof(terrace_gdn_decode_args) }
#endif

/* One to eight tokens of each sequence; states are updated in place. */
typedef struct terrace_gdn_decode_args {
    uint64_t size; /* sizeof(terrace_gdn_decode_args) */
    terrace_gdn_device device;
    int64_t tokens;
    uint32_t key_heads;
    uint32_t value_heads;
    terrace_gdn_tensor q, k, v, g, beta, o;
    /* In the device's memory, so that a graph can be replayed with others: token bounds [sequences + 1] and a slot for each
     * sequence, none twice. -1 is padding: its tokens are skipped. On CUDA nobody waits for these numbers to check them; what
     * lies outside the tensors or the pool is skipped too. */
    const int32_t *cu_seqlens;
    const int32_t *slots;
    int64_t sequences;
    terrace_gdn_pool pool;
    float scale;     /* 0 is 128^-0.5 */
    uint32_t l2norm; /* as above */
} terrace_gdn_decode_args;

/* Which path a call took, and why. Texts end with a null byte and are cut where they do not fit. */
typedef struct terrace_gdn_path {
    uint64_t windows;
    uint64_t chunks;
    uint64_t launches;
    uint64_t table_bytes; /* of the host's tables at a time */
    char route[32];       /* "cuda-streamed", "cuda-fused", "cuda-staged", "cuda-decode", "cpu-prefill" or "cpu-decode" */
    char arch[32];        /* "sm_90a"; "" on the CPU */
    char why[192];
} terrace_gdn_path;

/* Bytes that a prefill's workspace needs, whatever the number of tokens; window 0 is the default. A decode step needs none. */
terrace_gdn_status terrace_gdn_workspace_bytes(const terrace_gdn_device *device, uint32_t key_heads, uint32_t value_heads,
                                               uint32_t window, uint32_t design, uint64_t *bytes);

/* The largest window whose workspace fits in so many bytes, in tokens. */
terrace_gdn_status terrace_gdn_choose_window(const terrace_gdn_device *device, uint32_t key_heads, uint32_t value_heads,
                                             uint64_t budget, uint32_t design, uint32_t *window);

/* Compiles and loads the kernels for one type of q, k, v and o, so that no later call does. Nothing to do on the CPU. */
terrace_gdn_status terrace_gdn_prepare(const terrace_gdn_device *device, uint32_t dtype);

/* The two calls. `path` may be NULL. */
terrace_gdn_status terrace_gdn_prefill(const terrace_gdn_prefill_args *args, terrace_gdn_path *path);
terrace_gdn_status terrace_gdn_decode(const terrace_gdn_decode_args *args, terrace_gdn_path *path);

#ifdef __cplusplus
}
#endif

#endif
