// What a Gated DeltaNet layer does beside its projections and Gated DeltaNet itself: norms, the convolution over time with the
// gates, the feed-forward's gate. One launch for each, 16 bytes at a time, fp32 inside.
//
// A row, or a token's channel, is computed by the same threads in the same order wherever it lies, so no window changes a bit.

namespace block {

constexpr int THREADS = 256;
constexpr int TAPS = 4;
// Tokens that a thread of the convolution walks along.
constexpr int RUN = 16;

// Every kernel takes this struct and reads what concerns it.
struct Params {
    const u16* x;
    u16* y;
    const float* weight;
    const u16* state_in;
    u16* state_out;
    float* g;
    u16* beta;
    const float* decay;
    const float* dt_bias;
    u64 seed;
    i64 rows;
    i64 count;
    i64 x_stride;
    i64 y_stride;
    i32 width;
    i32 heads;
    i32 gates;
    i32 fresh;
    float eps;
    float scale;
};

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& from) {
    const u32 pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) to[2 * i] = low(pairs[i]), to[2 * i + 1] = high(pairs[i]);
}

__device__ __forceinline__ uint4 packed(const float (&from)[8]) {
    return make_uint4(pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7]));
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp2_fast(-x * LOG2E)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

}  // namespace block

// y = x / sqrt(mean x^2 + eps) weight. Grid: rows.
extern "C" __global__ void __launch_bounds__(block::THREADS) block_norm(const __grid_constant__ block::Params p) {
    using namespace block;
    __shared__ float sums[THREADS / 32];
    const uint4* x = reinterpret_cast<const uint4*>(p.x + (i64) blockIdx.x * p.x_stride);
    uint4* y = reinterpret_cast<uint4*>(p.y + (i64) blockIdx.x * p.y_stride);
    const int groups = p.width / 8;
    float sum = 0.0f;
    for (int at = threadIdx.x; at < groups; at += THREADS) {
        float v[8];
        unpack(v, x[at]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += v[i] * v[i];
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += sums[warp];
    const float scale = rsqrtf(sum / (float) p.width + p.eps);
    for (int at = threadIdx.x; at < groups; at += THREADS) {
        float v[8];
        unpack(v, x[at]);
        const float4* weight = reinterpret_cast<const float4*>(p.weight) + 2 * at;
        const float4 a = weight[0], b = weight[1];
        const float w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= scale * w[i];
        y[at] = packed(v);
    }
}

// The input of channels 8 group .. 8 group + 7 at a token; those before the first come from the last window.
__device__ __forceinline__ uint4 input_at(const block::Params& p, i64 token, int group) {
    if (token >= 0) return *reinterpret_cast<const uint4*>(p.x + token * p.x_stride + 8 * group);
    if (p.fresh) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(p.state_in + (token + block::TAPS - 1) * p.width + 8 * group);
}

// y = silu(convolution of x over the last four tokens), the gates g and beta, and the inputs that the next window begins with: in
// another buffer than those that this one begins with, since blocks run in any order.
// Grid: runs of tokens x groups of channels, then tokens x heads of gates.
extern "C" __global__ void __launch_bounds__(block::THREADS) block_conv(const __grid_constant__ block::Params p) {
    using namespace block;
    const int groups = p.width / 8, parts = (groups + THREADS - 1) / THREADS;
    const i64 runs = (p.rows + RUN - 1) / RUN, convolutions = runs * parts;
    if (blockIdx.x >= convolutions) {
        const i64 at = (blockIdx.x - convolutions) * THREADS + threadIdx.x;
        if (at >= p.rows * p.heads) return;
        const i64 token = at / p.heads;
        const int head = (int) (at % p.heads);
        const u16* gates = p.x + token * p.x_stride + p.gates;
        const float b = low(gates[head]), a = low(gates[p.heads + head]) + p.dt_bias[head];
        p.g[at] = p.decay[head] * (a > 20.0f ? a : log1pf(expf(a)));
        p.beta[at] = (u16) pack(sigmoid(b), 0.0f);
        return;
    }
    const i64 first = blockIdx.x / parts * RUN, last = min(first + (i64) RUN, (i64) p.rows);
    const int group = (int) (blockIdx.x % parts) * THREADS + threadIdx.x;
    if (group >= groups) return;
    float weight[TAPS][8], v[TAPS][8];
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        const float4* from = reinterpret_cast<const float4*>(p.weight + (i64) tap * p.width) + 2 * group;
        const float4 a = from[0], b = from[1];
        weight[tap][0] = a.x, weight[tap][1] = a.y, weight[tap][2] = a.z, weight[tap][3] = a.w;
        weight[tap][4] = b.x, weight[tap][5] = b.y, weight[tap][6] = b.z, weight[tap][7] = b.w;
    }
#pragma unroll
    for (int tap = 0; tap + 1 < TAPS; ++tap) unpack(v[tap + 1], input_at(p, first - (TAPS - 1) + tap, group));
    for (i64 token = first; token < last; ++token) {
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[0][i] = v[1][i], v[1][i] = v[2][i], v[2][i] = v[3][i];
        unpack(v[3], input_at(p, token, group));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[i] = v[0][i] * weight[0][i];
#pragma unroll
            for (int tap = 1; tap < TAPS; ++tap) sum[i] += v[tap][i] * weight[tap][i];
            sum[i] = silu(sum[i]);
        }
        *reinterpret_cast<uint4*>(p.y + token * p.y_stride + 8 * group) = packed(sum);
    }
    if (last == p.rows) {
#pragma unroll
        for (int place = 0; place + 1 < TAPS; ++place) {
            const uint4 kept = input_at(p, p.rows - (TAPS - 1) + place, group);
            *reinterpret_cast<uint4*>(p.state_out + (i64) place * p.width + 8 * group) = kept;
        }
    }
}

// y <- y / sqrt(mean y^2 + eps) weight silu(x) over the 128 elements of each head. Grid: tokens x heads / 8; a warp has a head.
extern "C" __global__ void __launch_bounds__(block::THREADS) block_gated_norm(const __grid_constant__ block::Params p) {
    using namespace block;
    const i64 at = (i64) blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
    if (at >= p.rows * p.heads) return;
    const int lane = threadIdx.x & 31;
    const i64 token = at / p.heads, head = at % p.heads;
    uint2* y = reinterpret_cast<uint2*>(p.y + token * p.y_stride + head * DIM) + lane;
    const uint2 o = *y, z = *(reinterpret_cast<const uint2*>(p.x + token * p.x_stride + head * DIM) + lane);
    const float4 weight = reinterpret_cast<const float4*>(p.weight)[lane];
    float v[4] = {low(o.x), high(o.x), low(o.y), high(o.y)};
    const float sum = warp_sum(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]);
    const float scale = rsqrtf(sum / (float) DIM + p.eps);
    v[0] *= scale * weight.x * silu(low(z.x)), v[1] *= scale * weight.y * silu(high(z.x));
    v[2] *= scale * weight.z * silu(low(z.y)), v[3] *= scale * weight.w * silu(high(z.y));
    *y = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

// y <- silu(y) up, where a row is y and up side by side, `width` elements each. Grid: rows x groups of eight.
extern "C" __global__ void __launch_bounds__(block::THREADS) block_silu(const __grid_constant__ block::Params p) {
    using namespace block;
    const int groups = p.width / 8;
    const i64 at = (i64) blockIdx.x * THREADS + threadIdx.x;
    if (at >= p.rows * groups) return;
    uint4* gate = reinterpret_cast<uint4*>(p.y + at / groups * p.y_stride) + at % groups;
    float v[8], up[8];
    unpack(v, *gate);
    unpack(up, gate[groups]);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = silu(v[i]) * up[i];
    *gate = packed(v);
}

// SplitMix64's finaliser, as in `weights.rs`.
__device__ __forceinline__ u64 mix(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// y[i] = scale times a number from -1 to 1 that depends on seed and i. Grid: elements / 1024.
extern "C" __global__ void __launch_bounds__(block::THREADS) block_fill(const __grid_constant__ block::Params p) {
    using namespace block;
    const i64 first = ((i64) blockIdx.x * THREADS + threadIdx.x) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (first + i >= p.count) return;
        const float unit = (float) (mix(p.seed ^ mix((u64) (first + i))) >> 40) * (1.0f / (float) (1 << 23)) - 1.0f;
        p.y[first + i] = (u16) pack(unit * p.scale, 0.0f);
    }
}
