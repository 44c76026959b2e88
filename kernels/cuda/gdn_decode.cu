// The fused recurrent step of Gated DeltaNet, for the few tokens per sequence that decoding and speculation bring (1 to 8).
//
// Memory is all the time it takes: the state of a head, 64 KiB in fp32, is read once and written once, in place, and everything
// else is hidden behind that. Per token, with S the state as [V, K]:
//
//     S <- e^g S;   d = beta (v - S k);   S <- S + d k^T;   o = scale S q
//
// Work is cut by rows of S, which do not depend on each other. Eight lanes hold a row, 16 elements each, in pieces of 16 bytes
// that interleave, so that a warp's load is four whole 128-byte lines; a warp holds 4 R rows and a block four warps:
//
//     lane    0    1    2  ...  7    0    1   ...            fp32: piece p of lane j is elements 32 p + 4 j .. + 4
//     row r  [....|....|....|....|  |....|....|....] ...     bf16: piece p of lane j is elements 64 p + 8 j .. + 8
//
// Both dot products of a row are taken on the state as it came, before decay and update, which needs one reduction where the
// text above needs two in turn: S k = e^g (S0 k) and S q = e^g (S0 q) + d (k.q).
//
// A row's bits do not depend on R, on the grid or on the batch: the same eight lanes add in the same order. R only trades
// latency (small batches) against registers and repeated loads of q and k (large ones).
//
// What the device's numbers say is not trusted: a slot outside the pool, or a token outside the tensors, is left alone.
//
// Element types and the constants of the format come from common.cuh, which the host puts before this text.

namespace decode {

enum Flags { L2NORM = 1, BETA16 = 2, GATE16 = 4 };

struct Params {
    const u16 *q, *k, *v;        // [T, Hk, 128], [T, Hk, 128], [T, Hv, 128]
    const void *g, *beta;        // [T, Hv], fp32 or the type of q
    u16 *o;                      // [T, Hv, 128]
    void *pool;                  // [slot, Hv, V = 128, K = 128], fp32 or bf16
    const i32 *cu_seqlens;       // [sequences + 1]
    const i32 *slots;            // [sequences]; negative: skipped
    i64 q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head, g_token, g_head, beta_token, beta_head;
    i64 pool_slot;               // all strides in elements
    i64 tokens, pool_slots;      // what the tensors and the pool hold
    float scale;
    i32 sequences, key_heads, value_heads, flags, reserved;
};

constexpr i32 LANES = 8, PER_LANE = DIM / LANES, WARPS = 4;
constexpr u32 ALL = 0xffffffffu;

// A state is touched by one warp alone and once: it must not push q and k out of L1.
__device__ __forceinline__ uint4 load_once(const void *at) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}

// And it is not read again soon: written through, it makes room for the next states (H200: 3 to 7% of the time).
__device__ __forceinline__ void store(void *at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

struct Fp32 {
    static constexpr i32 PIECES = 4, PIECE = 4, BYTES = 4;
    static __device__ __forceinline__ void unpack(uint4 raw, float *x) {
        x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
        x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
    }
    static __device__ __forceinline__ void put(void *at, const float *x) {
        store(at, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
};

struct Bf16 {
    static constexpr i32 PIECES = 2, PIECE = 8, BYTES = 2;
    static __device__ __forceinline__ void unpack(uint4 raw, float *x) {
        const u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            x[2 * i] = bf16_low(pairs[i]);
            x[2 * i + 1] = bf16_high(pairs[i]);
        }
    }
    static __device__ __forceinline__ void put(void *at, const float *x) {
        store(at, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    }
};

// What a lane needs of one token, as loaded. The next token is not asked for ahead: the registers that would hold it are worth
// more as further warps (H200: 1 to 14% of the time, at every batch).
template <i32 R> struct Token {
    u32 q[PER_LANE / 2], k[PER_LANE / 2];
    u16 v[R];
    float g, beta;
};

template <class S> __device__ __forceinline__ void load_row(const u16 *row, i32 lane, u32 *raw) {
#pragma unroll
    for (i32 p = 0; p < S::PIECES; ++p) {
        const u16 *at = row + (p * LANES + lane) * S::PIECE;
        if (S::PIECE == 4) {
            const uint2 x = *reinterpret_cast<const uint2 *>(at);
            raw[2 * p] = x.x, raw[2 * p + 1] = x.y;
        } else {
            const uint4 x = *reinterpret_cast<const uint4 *>(at);
            raw[4 * p] = x.x, raw[4 * p + 1] = x.y, raw[4 * p + 2] = x.z, raw[4 * p + 3] = x.w;
        }
    }
}

template <class S, i32 R>
__device__ __forceinline__ Token<R> load(const Params &p, i64 t, i32 key_head, i32 head, i32 row, i32 lane) {
    Token<R> x;
    load_row<S>(p.q + t * p.q_token + key_head * p.q_head, lane, x.q);
    load_row<S>(p.k + t * p.k_token + key_head * p.k_head, lane, x.k);
    const u16 *v = p.v + t * p.v_token + head * p.v_head + row;
    if constexpr (R == 4) {
        const uint2 pairs = *reinterpret_cast<const uint2 *>(v);
        x.v[0] = pairs.x, x.v[1] = pairs.x >> 16, x.v[2] = pairs.y, x.v[3] = pairs.y >> 16;
    } else if constexpr (R == 2) {
        const u32 pair = *reinterpret_cast<const u32 *>(v);
        x.v[0] = pair, x.v[1] = pair >> 16;
    } else {
        x.v[0] = *v;
    }
    x.g = load_scalar(p.g, t * p.g_token + head * p.g_head, p.flags & GATE16);
    x.beta = load_scalar(p.beta, t * p.beta_token + head * p.beta_head, p.flags & BETA16);
    return x;
}

// 1 / sqrt(sum x^2 + 1e-6) of q and of k, summed in the order in which host and prefill sum: two halves of 64 elements, each
// in turn. Lanes 0 to 3 of the warp take the halves of q, then of k; the loads are those of `load_row` again, now in L1.
__device__ __forceinline__ float2 norms(const u16 *q, const u16 *k) {
    const i32 lane = threadIdx.x % 32;
    float sum = 0.0f;
    if (lane < 4) {
        const u16 *half = (lane < 2 ? q : k) + (lane & 1) * 64;
#pragma unroll
        for (i32 i = 0; i < 8; ++i) {
            const uint4 x = reinterpret_cast<const uint4 *>(half)[i];
            const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (i32 j = 0; j < 4; ++j) {
                sum = __fmaf_rn(low(pairs[j]), low(pairs[j]), sum);
                sum = __fmaf_rn(high(pairs[j]), high(pairs[j]), sum);
            }
        }
    }
    sum += __shfl_xor_sync(ALL, sum, 1);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(sum, 1e-6f)));
    return make_float2(__shfl_sync(ALL, inverse, 0), __shfl_sync(ALL, inverse, 2));
}

// A lane's 16 elements as numbers, normalised and rounded back to the input's type where that is asked for.
__device__ __forceinline__ void numbers(const u32 *raw, bool normalise, float inverse, float *x) {
#pragma unroll
    for (i32 i = 0; i < PER_LANE / 2; ++i) {
        u32 pair = raw[i];
        if (normalise) pair = pack(__fmul_rn(low(pair), inverse), __fmul_rn(high(pair), inverse));
        x[2 * i] = low(pair), x[2 * i + 1] = high(pair);
    }
}

// The sum over the eight lanes of a row; each of them gets it.
__device__ __forceinline__ float total(float x) {
    x += __shfl_xor_sync(ALL, x, 4);
    x += __shfl_xor_sync(ALL, x, 2);
    return x + __shfl_xor_sync(ALL, x, 1);
}

// One token as numbers, with all that does not need the state.
template <i32 R> struct Ready {
    float q[PER_LANE], k[PER_LANE], v[R];
    float kq, decay, beta;
};

template <i32 R>
__device__ __forceinline__ Ready<R> prepare(const Params &p, const Token<R> &token, i64 t, i32 key_head) {
    Ready<R> x;
    const bool normalise = p.flags & L2NORM;
    float2 inverse = make_float2(1.0f, 1.0f);
    if (normalise)
        inverse = norms(p.q + t * p.q_token + key_head * p.q_head, p.k + t * p.k_token + key_head * p.k_head);
    numbers(token.q, normalise, inverse.x, x.q);
    numbers(token.k, normalise, inverse.y, x.k);
    float kq = 0.0f;
#pragma unroll
    for (i32 i = 0; i < PER_LANE; ++i) kq = __fmaf_rn(x.k[i], x.q[i], kq);
    x.kq = total(kq);
    x.decay = expf(clamp_gate(token.g));
    x.beta = token.beta;
#pragma unroll
    for (i32 r = 0; r < R; ++r) x.v[r] = low(token.v[r]);
    return x;
}

// Grid: sequences * Hv * slices, where a slice is the 16 R rows of a block.
template <class S, i32 R> __device__ __forceinline__ void step(const Params &p) {
    constexpr i32 SLICES = DIM / (4 * R * WARPS);
    const i32 slice = blockIdx.x % SLICES;
    const i32 head = blockIdx.x / SLICES % p.value_heads;
    const i32 sequence = blockIdx.x / SLICES / p.value_heads;
    const i32 key_head = head / (p.value_heads / p.key_heads);
    const i32 lane = threadIdx.x % LANES;
    const i32 row = (slice * (WARPS * 4) + threadIdx.x / LANES) * R;

    const i64 slot = p.slots[sequence];
    i64 t = p.cu_seqlens[sequence];
    const i64 end = p.cu_seqlens[sequence + 1];
    if (slot < 0 || slot >= p.pool_slots || t < 0 || t >= end || end > p.tokens) return;

    char *const state = static_cast<char *>(p.pool)
        + (slot * p.pool_slot + (i64(head) * DIM + row) * DIM + lane * S::PIECE) * S::BYTES;
    uint4 raw[R][S::PIECES];
#pragma unroll
    for (i32 r = 0; r < R; ++r)
#pragma unroll
        for (i32 i = 0; i < S::PIECES; ++i) raw[r][i] = load_once(state + (r * DIM + i * LANES * S::PIECE) * S::BYTES);

    // What does not need the state is done while it is on its way.
    Ready<R> now = prepare<R>(p, load<S, R>(p, t, key_head, head, row, lane), t, key_head);
    float s[R][PER_LANE];
#pragma unroll
    for (i32 r = 0; r < R; ++r)
#pragma unroll
        for (i32 i = 0; i < S::PIECES; ++i) S::unpack(raw[r][i], &s[r][i * S::PIECE]);

    while (true) {
        float sk[R], sq[R];
#pragma unroll
        for (i32 r = 0; r < R; ++r) {
            sk[r] = sq[r] = 0.0f;
#pragma unroll
            for (i32 i = 0; i < PER_LANE; ++i) {
                sk[r] = __fmaf_rn(s[r][i], now.k[i], sk[r]);
                sq[r] = __fmaf_rn(s[r][i], now.q[i], sq[r]);
            }
        }
        float o[R];
#pragma unroll
        for (i32 r = 0; r < R; ++r) {
            // Each rounding is spelled out, so that no instantiation fuses what another does not.
            const float d = __fmul_rn(now.beta, __fmaf_rn(-now.decay, total(sk[r]), now.v[r]));
            o[r] = __fmul_rn(p.scale, __fmaf_rn(d, now.kq, __fmul_rn(now.decay, total(sq[r]))));
#pragma unroll
            for (i32 i = 0; i < PER_LANE; ++i) s[r][i] = __fmaf_rn(d, now.k[i], __fmul_rn(now.decay, s[r][i]));
        }
        if (lane == 0) {
            u16 *at = p.o + t * p.o_token + head * p.o_head + row;
            if constexpr (R == 4) {
                *reinterpret_cast<uint2 *>(at) = make_uint2(pack(o[0], o[1]), pack(o[2], o[3]));
            } else if constexpr (R == 2) {
                *reinterpret_cast<u32 *>(at) = pack(o[0], o[1]);
            } else {
                *at = u16(pack(o[0], 0.0f));
            }
        }
        if (++t >= end) break;
        now = prepare<R>(p, load<S, R>(p, t, key_head, head, row, lane), t, key_head);
    }
#pragma unroll
    for (i32 r = 0; r < R; ++r)
#pragma unroll
        for (i32 i = 0; i < S::PIECES; ++i)
            S::put(state + (r * DIM + i * LANES * S::PIECE) * S::BYTES, &s[r][i * S::PIECE]);
}

}  // namespace decode

// Blocks a multiprocessor: as many as the registers of each allow without spills.
#if __CUDA_ARCH__ >= 1000
#define GDN_DECODE_BLOCKS_F32(rows) (rows == 1 ? 5 : rows == 2 ? 4 : 3)
#else
#define GDN_DECODE_BLOCKS_F32(rows) (rows == 1 ? 8 : rows == 2 ? 6 : 4)
#endif
#define GDN_DECODE_BLOCKS_BF16(rows) (rows == 1 ? 6 : rows == 2 ? 5 : 3)

#define DECODE(name, state, rows, blocks)                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, blocks(rows)) name(const __grid_constant__ decode::Params p) {      \
        decode::step<decode::state, rows>(p);                                                                             \
    }

DECODE(gdn_decode_f32_1, Fp32, 1, GDN_DECODE_BLOCKS_F32)
DECODE(gdn_decode_f32_2, Fp32, 2, GDN_DECODE_BLOCKS_F32)
DECODE(gdn_decode_f32_4, Fp32, 4, GDN_DECODE_BLOCKS_F32)
DECODE(gdn_decode_bf16_1, Bf16, 1, GDN_DECODE_BLOCKS_BF16)
DECODE(gdn_decode_bf16_2, Bf16, 2, GDN_DECODE_BLOCKS_BF16)
DECODE(gdn_decode_bf16_4, Bf16, 4, GDN_DECODE_BLOCKS_BF16)
