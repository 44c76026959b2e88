/* Every call of terrace_gdn.h on the CPU, in C99 and in C++17: a prefill against the recurrence written out here, the same prompt
 * cut in two, a decode step, and arguments that are wrong. On CUDA: that a machine without one says so. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "terrace_gdn.h"

#define CHECK(condition)                                                                                       \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            fprintf(stderr, "%s:%d: not so: %s\n  last error: %s\n", __FILE__, __LINE__, #condition,            \
                    terrace_gdn_last_error());                                                                 \
            exit(1);                                                                                           \
        }                                                                                                      \
    } while (0)

#define OK(call) CHECK((call) == TERRACE_GDN_OK)

#define FAILS(call, status, text)                                                                              \
    do {                                                                                                       \
        CHECK((call) == (status));                                                                             \
        CHECK(strstr(terrace_gdn_last_error(), text) != NULL);                                                 \
    } while (0)

enum { TOKENS = 200, CUT = 128, KEYS = 1, VALUES = 2, DIM = 128, STATE = DIM * DIM };

static float q[TOKENS * KEYS * DIM], k[TOKENS * KEYS * DIM], v[TOKENS * VALUES * DIM];
static float g[TOKENS * VALUES], beta[TOKENS * VALUES], o[TOKENS * VALUES * DIM], again[TOKENS * VALUES * DIM];
static float expected[TOKENS * VALUES * DIM], last[VALUES * STATE], states[VALUES * STATE];
static double state[DIM][DIM];

static float random_float(void) {
    static uint32_t seed = 7;
    seed = seed * 1664525u + 1013904223u;
    return (float)(seed >> 8) / (float)(1 << 24) - 0.5f;
}

static void fill(void) {
    int t, i;
    for (t = 0; t < TOKENS; ++t) {
        double sum = 0;
        for (i = 0; i < DIM; ++i) {
            q[t * DIM + i] = random_float(), k[t * DIM + i] = random_float();
            sum += k[t * DIM + i] * k[t * DIM + i];
        }
        for (i = 0; i < DIM; ++i) k[t * DIM + i] = (float)(k[t * DIM + i] / sqrt(sum));
        for (i = 0; i < VALUES * DIM; ++i) v[t * VALUES * DIM + i] = random_float();
        for (i = 0; i < VALUES; ++i) {
            g[t * VALUES + i] = -0.02f - 0.01f * (float)i;
            beta[t * VALUES + i] = 0.5f + random_float();
        }
    }
}

/* The recurrence as the header has it. */
static void recurrence(void) {
    int head, t, i, j;
    for (head = 0; head < VALUES; ++head) {
        memset(state, 0, sizeof state);
        for (t = 0; t < TOKENS; ++t) {
            const float *key = k + t * DIM, *query = q + t * DIM, *value = v + (t * VALUES + head) * DIM;
            const double decay = exp(g[t * VALUES + head]);
            for (i = 0; i < DIM; ++i) {
                double read = 0, out = 0;
                for (j = 0; j < DIM; ++j) state[i][j] *= decay, read += state[i][j] * key[j];
                for (j = 0; j < DIM; ++j) {
                    state[i][j] += beta[t * VALUES + head] * (value[i] - read) * key[j];
                    out += state[i][j] * query[j];
                }
                expected[(t * VALUES + head) * DIM + i] = (float)(out / sqrt((double)DIM));
            }
        }
    }
}

static int close_to(const float *a, const float *b, int count) {
    int i;
    double difference = 0, size = 0;
    for (i = 0; i < count; ++i) difference += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
    return difference <= 1e-10 * size;
}

static void set(terrace_gdn_tensor *tensor, float *data) {
    tensor->data = data;
    tensor->dtype = TERRACE_GDN_FP32;
}

static terrace_gdn_prefill_args prefill_of(int first, int tokens, float *out) {
    static void *memory = NULL;
    terrace_gdn_prefill_args args = TERRACE_GDN_PREFILL_INIT;
    args.device.kind = TERRACE_GDN_CPU;
    args.device.threads = 2;
    args.tokens = tokens, args.key_heads = KEYS, args.value_heads = VALUES;
    set(&args.q, q + first * KEYS * DIM), set(&args.k, k + first * KEYS * DIM), set(&args.v, v + first * VALUES * DIM);
    set(&args.g, g + first * VALUES), set(&args.beta, beta + first * VALUES), set(&args.o, out + first * VALUES * DIM);
    OK(terrace_gdn_workspace_bytes(&args.device, KEYS, VALUES, 0, TERRACE_GDN_FUSED, &args.workspace_bytes));
    if (memory == NULL) memory = calloc(1, (size_t)args.workspace_bytes + 255);
    CHECK(memory != NULL);
    args.workspace = (char *)memory + (256 - (uintptr_t)memory % 256) % 256;
    return args;
}

static void versions(void) {
    terrace_gdn_device cpu;
    uint32_t window = 0;
    CHECK(terrace_gdn_version() == TERRACE_GDN_VERSION);
    CHECK(strcmp(terrace_gdn_last_error(), "") == 0);
    CHECK(strcmp(terrace_gdn_status_name(TERRACE_GDN_NO_COMPILER), "TERRACE_GDN_NO_COMPILER") == 0);
    memset(&cpu, 0, sizeof cpu);
    cpu.kind = TERRACE_GDN_CPU;
    OK(terrace_gdn_choose_window(&cpu, 16, 48, 1u << 30, TERRACE_GDN_FUSED, &window));
    CHECK(window == 4096);
    OK(terrace_gdn_prepare(&cpu, TERRACE_GDN_FP32));
    puts("versions and sizes");
}

static void a_prefill(void) {
    terrace_gdn_path path;
    const int64_t bounds[] = { 0, TOKENS };
    const int64_t chunks[] = { 0, 0, 0, 1, 0, 2, 0, 3 };
    const int64_t offsets[] = { 0, 4 };
    terrace_gdn_prefill_args args = prefill_of(0, TOKENS, o);
    args.last.data = last, args.last.slots = 1, args.last.dtype = TERRACE_GDN_FP32;
    args.host_cu_seqlens = bounds, args.sequences = 1;
    args.host_chunk_indices = chunks, args.chunks = 4;
    args.host_chunk_offsets = offsets;
    memset(&path, 0xff, sizeof path);
    OK(terrace_gdn_prefill(&args, &path));
    CHECK(close_to(o, expected, TOKENS * VALUES * DIM));
    CHECK(strcmp(path.route, "cpu-prefill") == 0 && path.arch[0] == 0 && path.why[0] != 0);
    CHECK(path.chunks == 4 && path.launches == 0);
    puts("a prefill");
}

static void a_prefill_in_two_calls(void) {
    const uint8_t has[] = { 0 };
    terrace_gdn_prefill_args args = prefill_of(0, CUT, again);
    memset(states, 0xff, sizeof states);
    args.in_place = 1;
    args.last.data = states, args.last.slots = 1, args.last.dtype = TERRACE_GDN_FP32;
    args.host_has_initial = has;
    OK(terrace_gdn_prefill(&args, NULL));
    args = prefill_of(CUT, TOKENS - CUT, again);
    args.in_place = 1;
    args.last.data = states, args.last.slots = 1, args.last.dtype = TERRACE_GDN_FP32;
    OK(terrace_gdn_prefill(&args, NULL));
    CHECK(memcmp(again, o, sizeof o) == 0);
    CHECK(memcmp(states, last, sizeof last) == 0);
    puts("the same bits in two calls");
}

static void a_decode_step(void) {
    const int32_t bounds[] = { 0, 2, 4 }, slots[] = { 0, -1 };
    terrace_gdn_path path;
    terrace_gdn_decode_args args = TERRACE_GDN_DECODE_INIT;
    terrace_gdn_prefill_args before = prefill_of(0, TOKENS - 2, again);
    before.last.data = states, before.last.slots = 1, before.last.dtype = TERRACE_GDN_FP32;
    OK(terrace_gdn_prefill(&before, NULL));
    memset(again, 0, sizeof again);
    args.device = before.device;
    args.tokens = 4, args.key_heads = KEYS, args.value_heads = VALUES;
    /* The last two tokens, and two of padding which lie before them. */
    set(&args.q, q + (TOKENS - 2) * KEYS * DIM), set(&args.k, k + (TOKENS - 2) * KEYS * DIM);
    args.tokens = 2;
    set(&args.v, v + (TOKENS - 2) * VALUES * DIM), set(&args.o, again);
    set(&args.g, g + (TOKENS - 2) * VALUES), set(&args.beta, beta + (TOKENS - 2) * VALUES);
    args.cu_seqlens = bounds, args.slots = slots, args.sequences = 2;
    args.pool.data = states, args.pool.slots = 1, args.pool.dtype = TERRACE_GDN_FP32;
    FAILS(terrace_gdn_decode(&args, &path), TERRACE_GDN_BAD_ARGUMENT, "cu_seqlens[2] is 4");
    args.sequences = 1;
    OK(terrace_gdn_decode(&args, &path));
    CHECK(close_to(again, expected + (TOKENS - 2) * VALUES * DIM, 2 * VALUES * DIM));
    CHECK(close_to(states, last, VALUES * STATE));
    CHECK(strcmp(path.route, "cpu-decode") == 0);
    puts("a decode step");
}

static void wrong_arguments(void) {
    const int64_t backwards[] = { 0, 64, 32 };
    terrace_gdn_prefill_args args = prefill_of(0, TOKENS, again);
    terrace_gdn_prefill_args wrong = args;
    struct {
        terrace_gdn_prefill_args known;
        uint64_t newer;
    } larger;
    uint64_t bytes = 0;
    memset(again, 0x7f, sizeof again);
    FAILS(terrace_gdn_prefill(NULL, NULL), TERRACE_GDN_BAD_ARGUMENT, "args is null");
    wrong.size = 8;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "args.size is 8");
    wrong = args, wrong.device.kind = 9;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "device.kind is 9");
    wrong = args, wrong.tokens = -1;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "tokens is -1");
    wrong = args, wrong.k.dtype = 0;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "k.dtype is 0");
    wrong = args, wrong.v.data = NULL;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "v is a null pointer");
    wrong = args, wrong.o = wrong.v;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "overlap");
    wrong = args, wrong.value_heads = 0;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "0 value heads");
    wrong = args, wrong.window = 100;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "window of 100 tokens");
    wrong = args, wrong.design = 7;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "design is 7");
    wrong = args, wrong.in_place = 1;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "last.data is null");
    wrong = args, wrong.checkpoint_every = 1;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "checkpoints.data is null");
    wrong = args, wrong.workspace_bytes -= 1;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "workspace");
    wrong = args, wrong.host_cu_seqlens = backwards, wrong.sequences = 2;
    FAILS(terrace_gdn_prefill(&wrong, NULL), TERRACE_GDN_BAD_ARGUMENT, "cu_seqlens[2] is 32");
    memset(&larger, 0, sizeof larger);
    larger.known = args, larger.known.size = sizeof larger, larger.newer = 1;
    FAILS(terrace_gdn_prefill(&larger.known, NULL), TERRACE_GDN_BAD_ARGUMENT, "does not know");
    FAILS(terrace_gdn_workspace_bytes(&args.device, 3, 4, 0, 0, &bytes), TERRACE_GDN_BAD_ARGUMENT, "3 key heads");
    FAILS(terrace_gdn_workspace_bytes(&args.device, 1, 1, 0, 0, NULL), TERRACE_GDN_BAD_ARGUMENT, "bytes is null");
    {
        size_t i;
        for (i = 0; i < sizeof again; ++i) CHECK(((char *)again)[i] == 0x7f);
    }
    puts("wrong arguments");
}

static void cuda(void) {
    terrace_gdn_device device;
    terrace_gdn_status status;
    uint64_t bytes = 0;
    memset(&device, 0, sizeof device);
    device.kind = TERRACE_GDN_CUDA;
    /* Sizes need no device. */
    OK(terrace_gdn_workspace_bytes(&device, 16, 48, 0, TERRACE_GDN_FUSED, &bytes));
    CHECK(bytes > 0 && bytes <= 64u << 20);
    device.ordinal = 4096;
    status = terrace_gdn_prepare(&device, TERRACE_GDN_BF16);
    CHECK(status == TERRACE_GDN_NO_DEVICE || status == TERRACE_GDN_NOT_BUILT);
    puts("cuda");
}

int main(void) {
    fill();
    recurrence();
    versions();
    a_prefill();
    a_prefill_in_two_calls();
    a_decode_step();
    wrong_arguments();
    cuda();
    return 0;
}
