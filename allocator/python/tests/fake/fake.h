// What the two halves of the imagined CUDA share.
#pragma once

#include <atomic>
#include <cstddef>

constexpr int DEVICES = 2;
constexpr size_t MEMORY = size_t{8} << 30;

// Bytes in use by device, and how often any were asked for.
extern std::atomic<size_t> taken[DEVICES];
extern std::atomic<unsigned long> requests;

bool fake_is_capturing(void *stream);

// A handle that no other is like.
template <typename Handle>
void made(Handle *handle) {
    static std::atomic<size_t> next{0x1000};
    *handle = reinterpret_cast<Handle>(next.fetch_add(0x10));
}
