// The functions that PyTorch's CUDAPluggableAllocator calls, with the C++ types that it calls them with. A program by itself,
// and a library that a C program loads for itself alone, as Python loads an extension.

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

namespace {

using Stream = void *;
using PoolId = std::pair<std::uint64_t, std::uint64_t>;

// As CUDAPluggableAllocator declares them.
std::function<void *(std::size_t, int, Stream)> allocate(terrace_torch_malloc);
std::function<void(void *, std::size_t, int, Stream)> release(terrace_torch_free);
std::function<void(int)> init(terrace_torch_init);
std::function<void()> reset(terrace_torch_reset);
std::function<void(double, int)> memory_fraction(terrace_torch_memory_fraction);
std::function<void *(void *, std::size_t *)> base_alloc(terrace_torch_base_alloc);
std::function<void(void *, Stream)> record_stream(terrace_torch_record_stream);

// PyTorch takes these as numbers and calls them as functions of C++ types.
template <typename Function, typename Pointer>
Function *as(Pointer *pointer) {
    return reinterpret_cast<Function *>(reinterpret_cast<std::uintptr_t>(pointer));
}
auto *begin_pool = as<void(int, PoolId, std::function<bool(Stream)>)>(terrace_torch_begin_allocate_to_pool);
auto *end_pool = as<void(int, PoolId)>(terrace_torch_end_allocate_to_pool);
auto *release_pool = as<void(int, PoolId)>(terrace_torch_release_pool);

constexpr std::size_t KIB = 1024;
Stream const stream = nullptr;

// What a call throws, as PyTorch catches it.
std::string thrown(const std::function<void()> &call) {
    try {
        call();
    } catch (const std::exception &error) {
        CHECK(dynamic_cast<const std::runtime_error *>(&error) != nullptr);
        return error.what();
    }
    return "";
}

bool begins(const std::string &text, const std::string &with) { return text.compare(0, with.size(), with) == 0; }

// Counts its unwinding: an exception must run the destructors on its way.
struct Counted {
    int *count;
    ~Counted() { ++*count; }
};

void requests() {
    // The environment gives device 0 a budget of 1 MiB of host memory.
    init(1);
    CHECK(allocate(0, 0, stream) == nullptr);
    void *at = allocate(1000, 0, stream);
    CHECK(at != nullptr && reinterpret_cast<std::uintptr_t>(at) % 512 == 0);
    std::memset(at, 1, 1000);
    void *kept = allocate(300 * KIB, 0, stream);
    int unwound = 0;
    for (int i = 0; i < 100; i++) {
        const std::string text = thrown([&] {
            const Counted counted{&unwound};
            allocate(std::size_t{1} << 30, 0, stream);
        });
        CHECK(begins(text, "CUDA out of memory: torch asked for 1073741824 bytes, but of the reservation's 1048576 bytes "));
        CHECK(text.find("largest live buffers:") != std::string::npos);
    }
    CHECK(unwound == 100);
    CHECK(begins(thrown([] { allocate(SIZE_MAX, 0, stream); }), "CUDA out of memory: "));
    CHECK(begins(thrown([] { allocate(1, 64, stream); }), "terrace: ordinal is 64"));
    CHECK(begins(thrown([] { allocate(1, -1, stream); }), "terrace: ordinal is -1"));
    std::size_t size = 0;
    void *base = base_alloc(kept, &size);
    CHECK(size == 1024 * KIB && base <= kept && static_cast<char *>(kept) < static_cast<char *>(base) + size);
    CHECK(base_alloc(&size, &size) == nullptr && size == 0);
    release(at, 1000, 0, stream);
    release(kept, 300 * KIB, 0, stream);
    std::puts("requests");
}

void frees() {
    terrace_device *device = nullptr;
    OK(terrace_torch_device(0, &device));
    const auto before = figure(device, "unknown_free") + figure(device, "freed_twice");
    int mine = 0;
    release(nullptr, 1, 0, stream);
    release(&mine, 1, 0, stream);
    release(&mine, 1, -1, stream);
    release(&mine, 1, 63, stream);
    release(&mine, 1, 1000, stream);
    void *at = allocate(KIB, 0, stream);
    // The address decides, not the ordinal.
    release(at, KIB, 5, stream);
    release(at, KIB, 0, stream);
    CHECK(figure(device, "unknown_free") + figure(device, "freed_twice") == before + 2);
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; i++) {
        void *buffer = allocate(100 * KIB, 0, stream);
        threads.emplace_back([buffer] { release(buffer, 100 * KIB, 0, stream); });
    }
    for (std::thread &thread : threads) thread.join();
    at = allocate(1024 * KIB, 0, stream);
    record_stream(at, &mine);
    record_stream(&mine, &mine);
    record_stream(nullptr, &mine);
    release(at, 1024 * KIB, 0, stream);
    reset();
    at = allocate(1024 * KIB, 0, stream);
    release(at, 1024 * KIB, 0, stream);
    std::puts("frees");
}

void steps() {
    terrace_device *device = nullptr;
    OK(terrace_torch_device(0, &device));
    void *at[3] = {};
    for (void *&address : at) {
        OK(terrace_begin_step(device, "decode", 6, stream));
        address = allocate(64 * KIB, 0, stream);
        release(address, 64 * KIB, 0, stream);
        OK(terrace_end_step(device));
    }
    CHECK(at[1] == at[2] && figure(device, "steps_on_script") == 2);
    std::puts("steps");
}

void pools() {
    const PoolId id(3, 0x1234567890abcdef);
    std::string captured(100, 'x');  // so that the function owns memory
    bool asked = false;
    const std::function<bool(Stream)> filter = [captured, &asked](Stream) { return asked = captured.size() == 100; };
    begin_pool(0, id, filter);
    char *graph = static_cast<char *>(allocate(256 * KIB, 0, stream));
    end_pool(0, id);
    begin_pool(0, id, filter);
    end_pool(0, id);
    release(graph, 256 * KIB, 0, stream);
    CHECK(!asked && filter(stream));
    // Two graphs share the pool, and one is gone.
    release_pool(0, id);
    CHECK(begins(thrown([] { allocate(800 * KIB, 0, stream); }), "CUDA out of memory"));
    terrace_device *device = nullptr;
    OK(terrace_torch_device(0, &device));
    CHECK(terrace_release_pool(device, {3, 1}) == TERRACE_NO_SUCH_POOL);
    release_pool(0, id);
    CHECK(terrace_release_pool(device, {3, 0x1234567890abcdef}) == TERRACE_NO_SUCH_POOL);
    void *all = allocate(1024 * KIB, 0, stream);
    release(all, 1024 * KIB, 0, stream);
    // What was never begun, and devices that are not there.
    end_pool(0, id);
    release_pool(0, id);
    end_pool(9, id);
    release_pool(-1, id);
    CHECK(begins(thrown([&] { begin_pool(70, id, filter); }), "terrace: ordinal is 70"));
    std::puts("pools");
}

void registered() {
    terrace_device *device = nullptr, *other = nullptr;
    OK(terrace_create_host(2048 * KIB, &device));
    FAILS(terrace_torch_register(-1, device), TERRACE_BAD_ARGUMENT, "ordinal is -1");
    FAILS(terrace_torch_register(1, nullptr), TERRACE_BAD_ARGUMENT, "device is null");
    OK(terrace_torch_register(1, device));
    OK(terrace_torch_register(1, device));
    FAILS(terrace_torch_register(0, device), TERRACE_BAD_ARGUMENT, "0 has a device already");
    OK(terrace_torch_device(1, &other));
    CHECK(other == device);
    // It is still there after its maker has let go.
    OK(terrace_destroy(device));
    void *at = allocate(2048 * KIB, 1, stream);
    std::memset(at, 1, 2048 * KIB);
    release(at, 2048 * KIB, 1, stream);
    std::puts("registered");
}

void fractions() {
    memory_fraction(1.0, 0);
    CHECK(begins(thrown([] { memory_fraction(1e-9, 0); }), "terrace: fraction 0.000000001 is "));
    for (double wrong : {0.0, -1.0, 1.5, std::stod("nan")}) {
        CHECK(begins(thrown([&] { memory_fraction(wrong, 2); }), "terrace: fraction is "));
    }
    // Device 2 is not open yet: less than TERRACE_BUDGET of this machine's memory.
    memory_fraction(1e-5, 2);
    void *at = allocate(512, 2, stream);
    std::size_t size = 0;
    CHECK(base_alloc(at, &size) != nullptr && size > 0 && size < 1024 * KIB);
    release(at, 512, 2, stream);
    std::puts("fractions");
}

void environment() {
    setenv("TERRACE_BUDGET", "much", 1);
    CHECK(begins(thrown([] { init(1); }), "terrace: TERRACE_BUDGET is 'much', not a size"));
    CHECK(begins(thrown([] { allocate(512, 3, stream); }), "terrace: TERRACE_BUDGET is 'much', not a size"));
    unsetenv("TERRACE_BUDGET");
    init(1);
    CHECK(begins(thrown([] { allocate(512, 3, stream); }), "terrace: device 3 has no budget: set TERRACE_BUDGET"));
    setenv("TERRACE_BUDGET", "64KiB", 1);
    void *at = allocate(512, 3, stream);
    release(at, 512, 3, stream);
    std::puts("environment");
}

// What a companion compiled against PyTorch does: throws a class that only it knows.
struct Spent : std::runtime_error {
    using std::runtime_error::runtime_error;
};
void throw_spent(const char *text) { throw Spent(text); }
void throw_nothing(const char *) {}

void spent() {
    std::string text;
    terrace_torch_on_out_of_memory(throw_spent);
    try {
        allocate(std::size_t{1} << 30, 0, stream);
    } catch (const Spent &error) {
        text = error.what();
    }
    CHECK(begins(text, "CUDA out of memory: torch asked for 1073741824 bytes"));
    // Whatever else goes wrong is not its business.
    CHECK(begins(thrown([] { allocate(1, 64, stream); }), "terrace: ordinal is 64"));
    for (terrace_torch_thrower nobody : {throw_nothing, terrace_torch_thrower{nullptr}}) {
        terrace_torch_on_out_of_memory(nobody);
        CHECK(begins(thrown([] { allocate(std::size_t{1} << 30, 0, stream); }), "CUDA out of memory: "));
    }
    // A pool's request is refused by null.
    CHECK(terrace_torch_try_malloc(std::size_t{1} << 30, 0, stream) == nullptr);
    CHECK(begins(terrace_last_error(), "out of memory: torch asked for 1073741824 bytes"));
    CHECK(terrace_torch_try_malloc(0, 0, stream) == nullptr);
    void *at = terrace_torch_try_malloc(KIB, 0, stream);
    CHECK(at != nullptr);
    release(at, KIB, 0, stream);
    std::puts("spent");
}

// Freed when the process ends, after everything else is.
struct AtExit {
    void *at = nullptr;
    ~AtExit() { terrace_torch_free(at, KIB, 0, stream); }
} at_exit;

}  // namespace

extern "C" int torch_main() {
    requests();
    spent();
    frees();
    steps();
    pools();
    registered();
    fractions();
    environment();
    at_exit.at = allocate(KIB, 0, stream);
    std::fflush(nullptr);
    return 0;
}

#ifndef LIBRARY
int main() { return torch_main(); }
#endif
