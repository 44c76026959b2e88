// What every kernel of this crate stands on: element types, tile images, and the few PTX instructions that CUDA C++ does not name.
//
// No header is included, so that NVRTC needs no include path on the machine where it runs. Elements are kept as raw 16-bit
// words; GDN_FP16 picks what they mean.

using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using i64 = long long;
using u64 = unsigned long long;

#ifndef GDN_FP16
#define GDN_FP16 0
#endif

// Hopper's own instructions, and two blocks a multiprocessor of 128 registers a thread.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GDN_HOPPER 1
#else
#define GDN_HOPPER 0
#endif

constexpr int CHUNK = 64;
constexpr int DIM = 128;
constexpr float LOG2E = 1.4426950408889634f;

// ---------------------------------------------------------------------------------------------------------------- elements

// Two floats rounded to nearest even and packed, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
#if GDN_FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float low(u32 pair) {
#if GDN_FP16
    float value;
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(value) : "r"(pair));
    return value;
#else
    return bf16_low(pair);
#endif
}

__device__ __forceinline__ float high(u32 pair) {
#if GDN_FP16
    float value;
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(pair));
    return value;
#else
    return bf16_high(pair);
#endif
}

// A scalar input that is float or the element type.
__device__ __forceinline__ float load_scalar(const void* base, i64 index, bool is_element) {
    return is_element ? low((u32) static_cast<const u16*>(base)[index]) : static_cast<const float*>(base)[index];
}

// The decay of a token is at least e^-64, so that sums over a chunk stay exact enough and -inf - -inf never happens. A NaN stays a NaN.
__device__ __forceinline__ float clamp_gate(float g) { return g < -64.0f ? -64.0f : g; }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same number, but the compiler does not know it: what is computed from it stays inside the loop it stands in. Without this the
// addresses of a whole loop body are kept in registers, which then run out.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ------------------------------------------------------------------------------------------------------------- tile images

// A tile is 64 rows of 64 or 128 elements, kept as one or two panels of 64 rows by 128 bytes. In a panel the 16-byte group `g`
// of row `r` lies at group g ^ (r mod 8): eight rows of one group fall into different banks. The same image is used in shared
// and in device memory, so that tiles are copied without thought. Returns the byte offset of a 16-byte group.
__device__ __forceinline__ u32 tile_at(int row, int group) {
    return (u32) ((group >> 3) * 8192 + row * 128 + (((group & 7) ^ (row & 7)) << 4));
}

constexpr int TILE_BYTES = CHUNK * DIM * 2;
constexpr int SQUARE_BYTES = CHUNK * CHUNK * 2;

// --------------------------------------------------------------------------------------------------------------------- PTX

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32) __cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// c += a b for a 16x16 tile of elements a and a 16x8 tile b; fp32 sums.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if GDN_FP16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b for a 16x8 tile of tf32 a and an 8x8 tile b; fp32 sums.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 round_tf32(float x) {
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return rounded;
}

// 16 bytes from device to shared memory without registers; `valid` false writes zeros and reads nothing.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool valid = true) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Named barriers between parts of a block. Who arrives goes on; who syncs waits until `threads` have come.
__device__ __forceinline__ void barrier_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_arrive(int name, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
