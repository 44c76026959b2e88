/* Every call of terrace.h on host memory, as a C program makes them. Prints a line for each part that holds. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define KIB 1024u
#define MIB (1024u * KIB)

static void *const FIRST = NULL;
static int streams[2];
/* On host memory a stream is a name. */
#define SECOND ((void *)&streams[1])

static terrace_device *open_host(uint64_t budget) {
    terrace_device *device = NULL;
    OK(terrace_create_host(budget, &device));
    CHECK(device != NULL);
    return device;
}

static void *take(terrace_device *device, uint64_t bytes, void *stream, const char *label) {
    void *at = NULL;
    OK(terrace_alloc(device, bytes, stream, label, &at));
    CHECK(at != NULL && (uintptr_t)at % 512 == 0);
    memset(at, 0xab, (size_t)bytes);
    return at;
}

static void versions_and_names(void) {
    int status;
    CHECK(terrace_version() == TERRACE_VERSION);
    CHECK(strcmp(terrace_status_name(TERRACE_OK), "TERRACE_OK") == 0);
    CHECK(strcmp(terrace_status_name(TERRACE_NOT_LIVE), "TERRACE_NOT_LIVE") == 0);
    for (status = -2; status < 20; status++) CHECK(strncmp(terrace_status_name((terrace_status)status), "TERRACE_", 8) == 0);
    CHECK(terrace_last_error()[0] == '\0');
    puts("versions and names");
}

static void options(void) {
    terrace_options options = TERRACE_OPTIONS_INIT;
    terrace_device *device = NULL;
    void *base = NULL, *a = NULL, *b = NULL;
    uint64_t bytes = 0;
    FAILS(terrace_create(&options, &device), TERRACE_BAD_ARGUMENT, "backing");
    options.backing = TERRACE_HOST;
    FAILS(terrace_create(&options, &device), TERRACE_BAD_ARGUMENT, "budget");
    options.budget = MIB;
    options.align = 4096;
    options.patience = 2;
    options.most_keys = 3;
    OK(terrace_create(&options, &device));
    OK(terrace_reservation(device, &base, &bytes));
    CHECK(bytes == MIB && (uintptr_t)base % 4096 == 0);
    OK(terrace_alloc(device, 1, FIRST, NULL, &a));
    OK(terrace_alloc(device, 1, FIRST, NULL, &b));
    CHECK((uintptr_t)a % 4096 == 0 && (uintptr_t)b % 4096 == 0 && a != b);
    CHECK((char *)a >= (char *)base && (char *)a < (char *)base + bytes);
    OK(terrace_destroy(device));

    /* Redzones. */
    options.align = 0;
    options.debug = 1;
    OK(terrace_create(&options, &device));
    OK(terrace_alloc(device, 100, FIRST, "short", &a));
    memset(a, 1, 101);
    OK(terrace_free(device, a));
    CHECK(figure(device, "redzones_damaged") == 1);
    CHECK(*(unsigned char *)a == 0xfb);
    OK(terrace_destroy(device));

    options.align = 1024;
    FAILS(terrace_create(&options, &device), TERRACE_BAD_ARGUMENT, "align");
    CHECK(device == NULL);
    options.debug = 0;
    options.align = 8192;
    FAILS(terrace_create(&options, &device), TERRACE_BAD_ARGUMENT, "align");
    options.align = 48;
    FAILS(terrace_create(&options, &device), TERRACE_BAD_ARGUMENT, "align");
    options.align = 0;
    options.backing = 7;
    FAILS(terrace_create(&options, &device), TERRACE_BAD_ARGUMENT, "backing is 7");
    options.backing = TERRACE_HOST;
    options.size -= 1;
    device = (terrace_device *)(void *)&options;
    FAILS(terrace_create(&options, &device), TERRACE_BAD_ARGUMENT, "options.size");
    CHECK(device == NULL);
    options.size = sizeof options;
    options.reserved = 1;
    FAILS(terrace_create(&options, &device), TERRACE_BAD_ARGUMENT, "options.reserved");
    FAILS(terrace_create_host(1ULL << 62, &device), TERRACE_OUT_OF_MEMORY, "4611686018427387904 bytes");
    FAILS(terrace_create_host(~0ULL, &device), TERRACE_BAD_ARGUMENT, "budget");
    puts("options");
}

static void arguments(void) {
    terrace_device *device = open_host(MIB), *other = NULL;
    terrace_device *odd = (terrace_device *)(void *)((char *)device + 1);
    char buffer[8] = "unread", whole[4096];
    size_t length = 0;
    uint64_t bytes = 0;
    void *at = &bytes;
    terrace_pool pool = { 1, 2 };
    FAILS(terrace_create(NULL, &other), TERRACE_BAD_ARGUMENT, "options is null");
    FAILS(terrace_create_host(MIB, NULL), TERRACE_BAD_ARGUMENT, "out is null");
    FAILS(terrace_alloc(NULL, 1, FIRST, "a", &at), TERRACE_BAD_ARGUMENT, "device is null");
    CHECK(at == NULL);
    FAILS(terrace_alloc(odd, 1, FIRST, "a", &at), TERRACE_BAD_ARGUMENT, "device is not aligned");
    FAILS(terrace_alloc(device, 1, FIRST, "a", NULL), TERRACE_BAD_ARGUMENT, "out is null");
    FAILS(terrace_alloc(device, 1, FIRST, "a", (void **)(void *)((char *)&at + 1)), TERRACE_BAD_ARGUMENT, "out is not aligned");
    FAILS(terrace_alloc(device, (uint64_t)-1, FIRST, "a", &at), TERRACE_BAD_ARGUMENT, "bytes");
    at = &bytes;
    OK(terrace_alloc(device, 0, FIRST, "nothing", &at));
    CHECK(at == NULL);
    OK(terrace_free(device, NULL));
    OK(terrace_destroy(NULL));
    FAILS(terrace_free(NULL, device), TERRACE_BAD_ARGUMENT, "device");
    FAILS(terrace_record_stream(device, NULL, SECOND), TERRACE_BAD_ARGUMENT, "ptr is null");
    FAILS(terrace_begin_step(device, NULL, 3, FIRST), TERRACE_BAD_ARGUMENT, "key is null");
    FAILS(terrace_begin_step(device, "k", (size_t)-1, FIRST), TERRACE_BAD_ARGUMENT, "key");
    FAILS(terrace_end_step(device), TERRACE_NO_STEP, "begun no step");
    FAILS(terrace_begin_pool(device, pool, NULL, 1), TERRACE_BAD_ARGUMENT, "streams is null");
    FAILS(terrace_end_pool(device, pool), TERRACE_NO_SUCH_POOL, "(1, 2)");
    FAILS(terrace_release_pool(device, pool), TERRACE_NO_SUCH_POOL, "(1, 2)");
    FAILS(terrace_required_bytes(device, NULL), TERRACE_BAD_ARGUMENT, "out is null");
    FAILS(terrace_arena_bytes(NULL, &bytes), TERRACE_BAD_ARGUMENT, "device is null");
    FAILS(terrace_reservation(device, &at, NULL), TERRACE_BAD_ARGUMENT, "bytes is null");
    FAILS(terrace_on_failure(NULL, NULL, NULL), TERRACE_BAD_ARGUMENT, "device is null");
    FAILS(terrace_drain(NULL, 1), TERRACE_BAD_ARGUMENT, "device is null");

    /* As snprintf writes. */
    FAILS(terrace_stats_json(device, buffer, 8, NULL), TERRACE_BAD_ARGUMENT, "length is null");
    FAILS(terrace_stats_json(device, NULL, 8, &length), TERRACE_BAD_ARGUMENT, "buffer is null");
    OK(terrace_stats_json(device, NULL, 0, &length));
    CHECK(length > 100 && length < sizeof whole);
    OK(terrace_stats_json(device, whole, length + 1, &length));
    CHECK(strlen(whole) == length);
    OK(terrace_stats_json(device, whole, length, &length));
    CHECK(strlen(whole) == length - 1);
    OK(terrace_stats_json(device, buffer, 8, &length));
    CHECK(strlen(buffer) == 7 && strncmp(buffer, whole, 7) == 0);
    OK(terrace_stats_json(device, buffer, 1, &length));
    CHECK(buffer[0] == '\0');
    OK(terrace_destroy(device));
    puts("arguments");
}

/* A forward of three requests, the second on another stream; returns their addresses. */
static void forward(terrace_device *device, uint64_t middle, void *at[3]) {
    OK(terrace_begin_step(device, "prefill/64", 10, FIRST));
    at[0] = take(device, 64 * KIB, FIRST, "hidden");
    at[1] = take(device, middle, SECOND, "scratch");
    OK(terrace_free(device, at[0]));
    at[2] = take(device, 32 * KIB, FIRST, "out");
    OK(terrace_free(device, at[1]));
    OK(terrace_free(device, at[2]));
    OK(terrace_end_step(device));
}

static void steps(void) {
    terrace_device *device = open_host(MIB);
    void *at[4][3], *other = NULL;
    uint64_t required = 1, arena = 1;
    int step;
    OK(terrace_required_bytes(device, &required));
    OK(terrace_arena_bytes(device, &arena));
    CHECK(required == 0 && arena == 0);
    for (step = 0; step < 4; step++) forward(device, 16 * KIB, at[step]);
    /* The first is recorded, the second runs by the plan, and so do all that follow, at the same addresses. */
    CHECK(memcmp(at[1], at[2], sizeof at[1]) == 0 && memcmp(at[1], at[3], sizeof at[1]) == 0);
    CHECK(figure(device, "steps") == 4 && figure(device, "steps_on_script") == 3 && figure(device, "plans") == 1);
    CHECK(figure(device, "replay_allocs") == 9 && figure(device, "hits") == 9);
    OK(terrace_required_bytes(device, &required));
    OK(terrace_arena_bytes(device, &arena));
    CHECK(arena == 80 * KIB && required == 80 * KIB);
    CHECK(figure(device, "reservation") == MIB && figure(device, "outside") == 0);
    puts("record and replay");

    /* One that differs is served, counted and learnt. */
    forward(device, 24 * KIB, at[0]);
    CHECK(figure(device, "grew") == 1 && figure(device, "steps_on_script") == 3);
    forward(device, 24 * KIB, at[0]);
    forward(device, 24 * KIB, at[1]);
    CHECK(memcmp(at[0], at[1], sizeof at[0]) == 0);
    CHECK(figure(device, "steps_on_script") >= 4);
    OK(terrace_arena_bytes(device, &arena));
    CHECK(arena == 88 * KIB);

    /* The reservation changes between steps only, with nothing in it. */
    OK(terrace_begin_step(device, "prefill/64", 10, FIRST));
    FAILS(terrace_resize(device, 2 * MIB), TERRACE_STEP_OPEN, "prefill/64");
    OK(terrace_end_step(device));
    other = take(device, KIB, FIRST, "kept");
    FAILS(terrace_resize(device, 2 * MIB), TERRACE_NOT_EMPTY, "1 buffers");
    OK(terrace_free(device, other));
    FAILS(terrace_resize(device, 0), TERRACE_BAD_ARGUMENT, "budget");
    FAILS(terrace_resize(device, 1ULL << 62), TERRACE_OUT_OF_MEMORY, "4611686018427387904 bytes");
    OK(terrace_resize(device, 2 * MIB));
    OK(terrace_reservation(device, &other, &arena));
    CHECK(arena == 2 * MIB);
    other = take(device, 2 * MIB, FIRST, "all");
    OK(terrace_free(device, other));

    /* Nested begins count once, and a step may have no key. */
    OK(terrace_begin_step(device, NULL, 0, FIRST));
    OK(terrace_begin_step(device, "inner", 5, FIRST));
    OK(terrace_end_step(device));
    OK(terrace_end_step(device));
    FAILS(terrace_end_step(device), TERRACE_NO_STEP, "begun no step");
    CHECK(figure(device, "unbalanced") == 1 && figure(device, "steps") == 9);

    /* Destroyed in the middle of a step, with a live buffer. */
    OK(terrace_begin_step(device, "prefill/64", 10, FIRST));
    take(device, 64 * KIB, FIRST, "hidden");
    OK(terrace_destroy(device));
    puts("divergence");
}

struct hoard {
    terrace_device *device;
    void *kept[2];
    int calls;
};

static int give_one(void *user, uint64_t bytes) {
    struct hoard *hoard = (struct hoard *)user;
    void *none = NULL;
    CHECK(bytes == 700 * KIB);
    /* A request of the callback that fails does not call it again. */
    CHECK(terrace_alloc(hoard->device, 2 * MIB, FIRST, "inner", &none) == TERRACE_OUT_OF_MEMORY);
    if (hoard->calls >= 2) return 0;
    OK(terrace_free(hoard->device, hoard->kept[hoard->calls++]));
    return 1;
}

static int give_nothing(void *user, uint64_t bytes) {
    (void)user;
    (void)bytes;
    return 0;
}

static void out_of_memory(void) {
    terrace_device *device = open_host(MIB);
    struct hoard hoard = { NULL, { NULL, NULL }, 0 };
    void *at = &hoard;
    void *cache;
    cache = take(device, 300 * KIB, FIRST, "kv cache");
    FAILS(terrace_alloc(device, 2 * MIB, FIRST, "logits", &at), TERRACE_OUT_OF_MEMORY, "out of memory: logits asked for 2097152 bytes");
    CHECK(at == NULL);
    CHECK(strstr(terrace_last_error(), "1048576 bytes") != NULL);
    CHECK(strstr(terrace_last_error(), "largest live buffers:\n            307200  kv cache") != NULL);
    OK(terrace_destroy(device));

    device = open_host(MIB);
    hoard.device = device;
    /* What a callback frees is used, for as long as it frees. */
    hoard.kept[0] = take(device, 400 * KIB, FIRST, "kept");
    hoard.kept[1] = take(device, 400 * KIB, FIRST, "kept");
    OK(terrace_on_failure(device, give_one, &hoard));
    at = take(device, 700 * KIB, FIRST, "wanted");
    CHECK(hoard.calls == 2);
    CHECK(terrace_alloc(device, 700 * KIB, FIRST, "wanted", &cache) == TERRACE_OUT_OF_MEMORY);
    OK(terrace_on_failure(device, NULL, NULL));
    CHECK(terrace_alloc(device, MIB, FIRST, "wanted", &cache) == TERRACE_OUT_OF_MEMORY);
    OK(terrace_free(device, at));
    at = take(device, MIB, FIRST, "all");
    OK(terrace_free(device, at));

    /* What waits for events is waited for once the callback has nothing left. */
    OK(terrace_on_failure(device, give_nothing, &hoard));
    at = take(device, MIB, FIRST, "shared");
    OK(terrace_record_stream(device, at, SECOND));
    OK(terrace_free(device, at));
    at = take(device, MIB, FIRST, "all");
    OK(terrace_destroy(device));
    puts("out of memory");
}

static void pools(void) {
    terrace_device *device = open_host(MIB);
    terrace_pool pool = { 7, 9 };
    void *const only[1] = { SECOND };
    char *graph, *eager, *others[64];
    uint64_t required = 0;
    int count = 0, i;
    OK(terrace_begin_pool(device, pool, only, 1));
    graph = (char *)take(device, 256 * KIB, SECOND, "graph");
    eager = (char *)take(device, 64 * KIB, FIRST, "eager");
    OK(terrace_end_pool(device, pool));
    FAILS(terrace_end_pool(device, pool), TERRACE_NO_SUCH_POOL, "(7, 9)");
    OK(terrace_free(device, graph));
    OK(terrace_free(device, eager));
    OK(terrace_required_bytes(device, &required));
    CHECK(required == 256 * KIB);
    /* Free inside the pool, and never anybody else's. */
    while (count < 64 && terrace_alloc(device, 64 * KIB, FIRST, "other", (void **)(void *)&others[count]) == TERRACE_OK) {
        CHECK(others[count] + 64 * KIB <= graph || others[count] >= graph + 256 * KIB);
        count++;
    }
    CHECK(count == 12);
    /* A second capture reuses it. */
    OK(terrace_begin_pool(device, pool, NULL, 0));
    CHECK((char *)take(device, 256 * KIB, FIRST, "graph") == graph);
    OK(terrace_end_pool(device, pool));
    OK(terrace_release_pool(device, pool));
    CHECK(terrace_alloc(device, 64 * KIB, FIRST, "other", (void **)(void *)&others[count]) == TERRACE_OUT_OF_MEMORY);
    OK(terrace_free(device, graph));
    FAILS(terrace_release_pool(device, pool), TERRACE_NO_SUCH_POOL, "(7, 9)");
    for (i = 0; i < count; i++) OK(terrace_free(device, others[i]));
    take(device, MIB, FIRST, "all");
    OK(terrace_destroy(device));
    puts("pools");
}

static void several_streams(void) {
    terrace_device *device = open_host(MIB);
    void *at = take(device, 900 * KIB, FIRST, "shared");
    OK(terrace_record_stream(device, at, SECOND));
    OK(terrace_free(device, at));
    FAILS(terrace_record_stream(device, at, SECOND), TERRACE_NOT_LIVE, "record_stream ignored");
    /* What waits for an event is given back when it is needed. */
    at = take(device, 900 * KIB, FIRST, "next");
    OK(terrace_record_stream(device, at, SECOND));
    OK(terrace_free(device, at));
    OK(terrace_drain(device, 0));
    OK(terrace_drain(device, 1));
    at = take(device, MIB, FIRST, "all");
    OK(terrace_destroy(device));
    puts("several streams");
}

static void wrong_frees(void) {
    terrace_device *device = open_host(MIB), *second = open_host(MIB);
    int mine = 0;
    char *at = (char *)take(device, KIB, FIRST, "once");
    FAILS(terrace_free(device, at + 16), TERRACE_NOT_LIVE, "no live buffer begins at");
    FAILS(terrace_free(device, &mine), TERRACE_NOT_LIVE, "this device has no memory at");
    FAILS(terrace_free(second, at), TERRACE_NOT_LIVE, "this device has no memory at");
    OK(terrace_free(device, at));
    FAILS(terrace_free(device, at), TERRACE_NOT_LIVE, "no live buffer begins at");
    CHECK(figure(device, "freed_twice") == 2 && figure(device, "unknown_free") == 1);
    CHECK(figure(second, "unknown_free") == 1);
    take(device, MIB, FIRST, "all");
    OK(terrace_destroy(device));
    OK(terrace_destroy(second));
    puts("wrong frees");
}

#define THREADS 8
#define EACH 64

struct share {
    terrace_device *device;
    void *at[EACH];
};

static void *free_share(void *user) {
    struct share *share = (struct share *)user;
    int i;
    for (i = 0; i < EACH; i++) OK(terrace_free(share->device, share->at[i]));
    /* Each its own errors. */
    CHECK(terrace_last_error()[0] == '\0');
    FAILS(terrace_free(share->device, share->at[0]), TERRACE_NOT_LIVE, "free ignored");
    return NULL;
}

static void threads(void) {
    terrace_device *device = open_host(THREADS * EACH * KIB);
    struct share shares[THREADS];
    pthread_t thread[THREADS];
    int i, j;
    for (i = 0; i < THREADS; i++) {
        shares[i].device = device;
        for (j = 0; j < EACH; j++) shares[i].at[j] = take(device, KIB, FIRST, "shared out");
    }
    for (i = 0; i < THREADS; i++) CHECK(pthread_create(&thread[i], NULL, free_share, &shares[i]) == 0);
    for (i = 0; i < THREADS; i++) CHECK(pthread_join(thread[i], NULL) == 0);
    CHECK(figure(device, "freed_twice") == THREADS && figure(device, "outside") == 0);
    take(device, THREADS * EACH * KIB, FIRST, "all");
    OK(terrace_destroy(device));
    puts("threads");
}

static void forks(void) {
    terrace_device *device = open_host(MIB), *own = NULL;
    void *at = take(device, KIB, FIRST, "parent's");
    int status = 0;
    pid_t child;
    fflush(NULL);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        FAILS(terrace_alloc(device, KIB, FIRST, "child's", &at), TERRACE_FORKED, "after fork()");
        FAILS(terrace_free(device, device), TERRACE_FORKED, "after fork()");
        FAILS(terrace_begin_step(device, "k", 1, FIRST), TERRACE_FORKED, "after fork()");
        FAILS(terrace_on_failure(device, NULL, NULL), TERRACE_FORKED, "after fork()");
        FAILS(terrace_torch_register(3, device), TERRACE_FORKED, "after fork()");
        FAILS(terrace_destroy(device), TERRACE_FORKED, "after fork()");
        OK(terrace_create_host(MIB, &own));
        OK(terrace_alloc(own, KIB, FIRST, "child's", &at));
        OK(terrace_destroy(own));
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(terrace_free(device, at));
    OK(terrace_destroy(device));
    puts("forks");
}

int main(void) {
    versions_and_names();
    options();
    arguments();
    steps();
    out_of_memory();
    pools();
    several_streams();
    wrong_frees();
    threads();
    forks();
    return 0;
}
