// The intra-chunk work of one (chunk, key head): everything that needs this chunk's tokens only.
//
// Two warpgroups. The solver keeps k k^T and makes, for one value head after the other, L and its inverse. The multiplier keeps
// q k^T and makes p, and u and w of the head that the solver has just finished, while the solver is at the next.

// Floats from one row of the fp32 square to the next: eight rows of an operand then fall into different banks.
constexpr int SQUARE_STRIDE = 72;

struct IntraShared {
    char k[TILE_BYTES];
    char stage[TILE_BYTES];                   // q, later w on its way out
    char v[TILE_BYTES];
    float square[CHUNK * SQUARE_STRIDE];      // L, with its diagonal blocks inverted in place
    char inverse[2][SQUARE_BYTES];            // transposed, scaled for u and for w
    char p[SQUARE_BYTES];
#if GDN_HOPPER
    float4 scores[8][HALF];                   // scale q k^T, each thread's own: registers are short here, shared memory elsewhere
    int4 item;                                // x: what gdn_stream has the block do
#endif
    // Of four value heads at a time, one a warp of the solver.
    float gate[4][CHUNK];                     // G, log2
    float beta[4][CHUNK];
    float decay[4][CHUNK];                    // e^G
};

// Named barriers of an intra block: inside each warpgroup, and that the inverse of a head is there, or free again.
enum IntraBarrier { SOLVER = 1, MULTIPLIER = 2, INVERSE_READY = 3, INVERSE_FREE = 4 };

// x / sqrt(sum x^2 + 1e-6), rounded to an element: two lanes a row, each sums its 64 elements in order.
__device__ __forceinline__ void normalise_rows(char* tile, int thread) {
    const int row = thread >> 1, half = thread & 1;
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < 8; ++group) {
        const uint4 x = *reinterpret_cast<const uint4*>(tile + tile_at(row, 8 * half + group));
        const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum = __fmaf_rn(low(pairs[i]), low(pairs[i]), sum);
            sum = __fmaf_rn(high(pairs[i]), high(pairs[i]), sum);
        }
    }
    sum = __fadd_rn(__shfl_sync(~0u, sum, (thread & 31) & ~1), __shfl_sync(~0u, sum, (thread & 31) | 1));
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(sum, 1e-6f)));
#pragma unroll
    for (int group = 0; group < 8; ++group) {
        uint4* at = reinterpret_cast<uint4*>(tile + tile_at(row, 8 * half + group));
        uint4 x = *at;
        x.x = pack(__fmul_rn(low(x.x), inverse), __fmul_rn(high(x.x), inverse));
        x.y = pack(__fmul_rn(low(x.y), inverse), __fmul_rn(high(x.y), inverse));
        x.z = pack(__fmul_rn(low(x.z), inverse), __fmul_rn(high(x.z), inverse));
        x.w = pack(__fmul_rn(low(x.w), inverse), __fmul_rn(high(x.w), inverse));
        *at = x;
    }
}

// The rows of a times the rows of k, for this warp's 16 rows and all columns up to its diagonal block.
__device__ __forceinline__ void row_products(float (&c)[8][4], u32 a_tile, u32 k_tile, int warp, int lane) {
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[t][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        u32 a[4];
        load_a(a, a_tile, lane, warp, step);
#pragma unroll
        for (int block = 0; block < 4; ++block)
            if (block <= warp) {
                u32 b[4];
                load_b(b, k_tile, lane, block, step);
                mma(c[2 * block], a, b[0], b[1]);
                mma(c[2 * block + 1], a, b[2], b[3]);
            }
    }
}

// The two 8-wide tiles of the diagonal block, whose place depends on the warp.
__device__ __forceinline__ void diagonal_tiles(float (&diagonal)[2][4], const float (&c)[8][4], int warp) {
#pragma unroll
    for (int t = 0; t < 8; ++t)
        if ((t >> 1) == warp) {
#pragma unroll
            for (int e = 0; e < 4; ++e) diagonal[t & 1][e] = c[t][e];
        }
}

// e^{G_i - G_j} of the four entries that a lane holds of an 8-wide tile. On the diagonal it is masked before the exponential, since
// above it would overflow.
__device__ __forceinline__ void decays(float (&decay)[4], const float (&gate)[2], float2 other) {
    decay[0] = exp2_fast(gate[0] - other.x), decay[1] = exp2_fast(gate[0] - other.y);
    decay[2] = exp2_fast(gate[1] - other.x), decay[3] = exp2_fast(gate[1] - other.y);
}

__device__ __forceinline__ void decays_on_diagonal(float (&decay)[4], const float (&gate)[2], float2 other, int lane, int t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int i = (lane >> 2) + 8 * (e >> 1), j = 8 * t + 2 * (lane & 3) + (e & 1);
        decay[e] = exp2_fast(i >= j ? gate[e >> 1] - (e & 1 ? other.y : other.x) : 0.0f);
        if (i < j) decay[e] = 0.0f;
    }
}

// Log decay (in units of log2) and beta of two rows of one head: a lane's share.
struct Gates {
    float g[2], beta[2];
};

__device__ __forceinline__ Gates load_gates(const Params& p, i64 token, int rows, int head, int lane) {
    Gates gates;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int row = 2 * lane + e;
        const i64 at = token + min(row, rows - 1);
        const bool valid = row < rows;
        gates.g[e] = clamp_gate(load_scalar(p.g, at * p.g_token + head * p.g_head, p.flags & GATE_ELEMENT)) * LOG2E;
        gates.beta[e] = load_scalar(p.beta, at * p.beta_token + head * p.beta_head, p.flags & BETA_ELEMENT);
#ifndef GDN_MUTANT_LAST_ROW
        gates.g[e] = valid ? gates.g[e] : 0.0f;
#endif
        gates.beta[e] = valid ? gates.beta[e] : 0.0f;
    }
    return gates;
}

// By one warp: G, e^G and beta of its head to shared memory, e^G and e^{Glast-G} to the workspace.
__device__ __forceinline__ void sum_gates(const Gates& gates, IntraShared& s, float* out, int warp, int lane) {
    const float (&g)[2] = gates.g;
    float sum = g[0] + g[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float before = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += before;
    }
    float before = __shfl_up_sync(~0u, sum, 1);
    if (lane == 0) before = 0.0f;
    const float total = __shfl_sync(~0u, sum, 31);
    const float gate[2] = {before + g[0], sum};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int row = 2 * lane + e;
        s.gate[warp][row] = gate[e];
        s.beta[warp][row] = gates.beta[e];
        s.decay[warp][row] = exp2_fast(gate[e]);
    }
    *reinterpret_cast<float2*>(out + 2 * lane) = make_float2(exp2_fast(gate[0]), exp2_fast(gate[1]));
    *reinterpret_cast<float2*>(out + CHUNK + 2 * lane) = make_float2(exp2_fast(total - gate[0]), exp2_fast(total - gate[1]));
}

// Inverts this warp's 16x16 diagonal block I + L in place by forward substitution, a column a lane.
__device__ __forceinline__ void invert_diagonal(float* block, int lane) {
    const int column = lane & 15;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float row[16];
#pragma unroll
        for (int k = 0; k < i; k += 4) {
            const float4 four = *reinterpret_cast<const float4*>(block + i * SQUARE_STRIDE + k);
            row[k] = four.x, row[k + 1] = four.y, row[k + 2] = four.z, row[k + 3] = four.w;
        }
        float value = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < i; ++k) value = __fmaf_rn(-row[k], x[k], value);
        x[i] = value;
    }
    __syncwarp();
    if (lane < 16) {
#pragma unroll
        for (int i = 0; i < 16; ++i) block[i * SQUARE_STRIDE + lane] = x[i];
    }
}

// Sums of a 16x16 block as operand a, a column pair a step: its two columns count as k and k + 4.
__device__ __forceinline__ void round_block(u32 (&a)[2][4], const float (&c)[2][4]) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        a[t][0] = round_tf32(c[t][0]), a[t][1] = round_tf32(c[t][2]);
        a[t][2] = round_tf32(c[t][1]), a[t][3] = round_tf32(c[t][3]);
    }
}

// c[step] += a b^T of 16x16 blocks, b a block of the square; each half of the sum by itself, so that neither waits for the other.
__device__ __forceinline__ void product(float (&c)[2][2][4], const u32 (&a)[2][4], const float* b, int lane) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const float2 pair = *reinterpret_cast<const float2*>(b + (8 * t + (lane >> 2)) * SQUARE_STRIDE + 8 * step + 2 * (lane & 3));
            mma_tf32(c[step][t], a[step], round_tf32(pair.x), round_tf32(pair.y));
        }
}

// Block column `warp` of the inverse, transposed, times beta (for u) and beta e^G (for w) by columns, as images: operands v and k then
// stay exact. Its unit diagonal is left out; what that contributes is added to the sums unrounded. Needs every warp's diagonal.
//     X_ij = -X_ii sum_{k=j}^{i-1} L_ik X_kj
// in tf32 with fp32 sums: what the inverse is rounded to afterwards is far coarser.
__device__ __forceinline__ void invert_column(IntraShared& s, const float (&beta)[2], const float (&decay)[2], int warp, int lane) {
    const auto block = [&](int i, int k) { return s.square + 16 * i * SQUARE_STRIDE + 16 * k; };
    const auto write = [&](int i, const float (&y)[2][4]) {
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float x = y[t][2 * half] * beta[half], z = y[t][2 * half + 1] * beta[half];
                const u32 at = tile_at(16 * warp + (lane >> 2) + 8 * half, 2 * i + t) + 4 * (lane & 3);
                *reinterpret_cast<u32*>(s.inverse[0] + at) = pack(x, z);
                *reinterpret_cast<u32*>(s.inverse[1] + at) = pack(x * decay[half], z * decay[half]);
            }
    };
    u32 rounded[3][2][4];
    {
        float y[2][4];
        const float* own = block(warp, warp) + 2 * (lane & 3) * SQUARE_STRIDE + (lane >> 2);
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) y[t][e] = own[(8 * t + (e & 1)) * SQUARE_STRIDE + 8 * (e >> 1)];
        round_block(rounded[0], y);
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (8 * t + 2 * (lane & 3) + (e & 1) == (lane >> 2) + 8 * (e >> 1)) y[t][e] = 0.0f;
        write(warp, y);
    }
#pragma unroll
    for (int d = 1; d < 4; ++d)
        if (warp + d < 4) {
            float sum[2][2][4] = {}, z[2][4];
#pragma unroll
            for (int k = 0; k < d; ++k) product(sum, rounded[k], block(warp + d, warp + k), lane);
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) z[t][e] = -(sum[0][t][e] + sum[1][t][e]);
            u32 a[2][4];
            round_block(a, z);
            float last[2][2][4] = {};
            product(last, a, block(warp + d, warp + d), lane);
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) z[t][e] = last[0][t][e] + last[1][t][e];
            if (d < 3) round_block(rounded[d], z);
            write(warp + d, z);
        }
}

// Adds factor x, entry by entry, for a 16x16 block x of elements in operand-a order: sums have the same order. A factor is of one pair.
__device__ __forceinline__ void add_scaled(float (&left)[4], float (&right)[4], const u32 (&x)[4], float2 f0, float2 f1, float2 f2, float2 f3) {
    left[0] += f0.x * low(x[0]), left[1] += f0.y * high(x[0]);
    left[2] += f1.x * low(x[1]), left[3] += f1.y * high(x[1]);
    right[0] += f2.x * low(x[2]), right[1] += f2.y * high(x[2]);
    right[2] += f3.x * low(x[3]), right[3] += f3.y * high(x[3]);
}

// One warpgroup: L of each head, and its inverse.
__device__ __forceinline__ void solve(const Params& p, const Side& side, IntraShared& s, const float (&kk)[8][4], Gates gates, i64 token, int rows, int slot,
                                      int key_head, int warp, int own_lane) {
    const int group = p.value_heads / p.key_heads;
    float diagonal[2][4];
    diagonal_tiles(diagonal, kk, warp);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
        const int head = key_head * group + member, quarter = member & 3;
        const int lane = opaque(own_lane), row0 = 16 * warp + (lane >> 2), column0 = 2 * (lane & 3);
        if (quarter == 0) {
            // Four more heads' gates, when nobody reads the last four any more.
            if (member > 0) {
                if (member + warp < group) gates = load_gates(p, token, rows, head + warp, lane);
                __syncthreads();
            }
            if (member + warp < group)
                sum_gates(gates, s, side.gate + ((i64) slot * p.value_heads + head + warp) * GATES, warp, lane);
            __syncthreads();
        }
        const float gate[2] = {s.gate[quarter][row0], s.gate[quarter][row0 + 8]}, beta[2] = {s.beta[quarter][row0], s.beta[quarter][row0 + 8]};
        const auto write = [&](int t, const float (&c)[4], const float (&decay)[4]) {
            *reinterpret_cast<float2*>(s.square + row0 * SQUARE_STRIDE + 8 * t + column0) =
                make_float2(beta[0] * (c[0] * decay[0]), beta[0] * (c[1] * decay[1]));
            *reinterpret_cast<float2*>(s.square + (row0 + 8) * SQUARE_STRIDE + 8 * t + column0) =
                make_float2(beta[1] * (c[2] * decay[2]), beta[1] * (c[3] * decay[3]));
        };
#pragma unroll
        for (int t = 0; t < 6; ++t)
            if (t < 2 * warp) {
                float decay[4];
                decays(decay, gate, *reinterpret_cast<const float2*>(&s.gate[quarter][8 * t + column0]));
                write(t, kk[t], decay);
            }
        // The diagonal block's own diagonal and what lies above are never read.
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            float decay[4];
            decays_on_diagonal(decay, gate, *reinterpret_cast<const float2*>(&s.gate[quarter][8 * (2 * warp + t) + column0]), lane, t);
            write(2 * warp + t, diagonal[t], decay);
        }
        __syncwarp();
        invert_diagonal(s.square + 16 * warp * (SQUARE_STRIDE + 1), lane);
        barrier_sync(SOLVER, HALF);
        if (member > 0) barrier_sync(INVERSE_FREE, THREADS);
        const float decay[2] = {s.decay[quarter][row0], s.decay[quarter][row0 + 8]};
        invert_column(s, beta, decay, warp, lane);
        barrier_arrive(INVERSE_READY, THREADS);
        barrier_sync(SOLVER, HALF);
    }
}

// The other warpgroup: p of each head, and u and w once its inverse is there.
__device__ __forceinline__ void multiply(const Params& p, const Side& side, IntraShared& s, const float (&own_scores)[8][4], i64 token, int rows, int slot,
                                         int key_head, int warp, int own_lane) {
    const int group = p.value_heads / p.key_heads, thread = threadIdx.x - HALF;
    const u32 k_tile = shared_address(s.k), v_tile = shared_address(s.v), for_u = shared_address(s.inverse[0]), for_w = shared_address(s.inverse[1]);
#if GDN_HOPPER
#pragma unroll
    for (int t = 0; t < 8; ++t) s.scores[t][thread] = make_float4(own_scores[t][0], own_scores[t][1], own_scores[t][2], own_scores[t][3]);
    const auto scores = [&](int t) { return s.scores[t][thread]; };
    const auto diagonal_scores = [&](int t) { return s.scores[2 * warp + t][thread]; };
#else
    float diagonal[2][4];
    diagonal_tiles(diagonal, own_scores, warp);
    const auto scores = [&](int t) { return make_float4(own_scores[t][0], own_scores[t][1], own_scores[t][2], own_scores[t][3]); };
    const auto diagonal_scores = [&](int t) { return make_float4(diagonal[t][0], diagonal[t][1], diagonal[t][2], diagonal[t][3]); };
#endif
    const auto write = [&](int t, const float (&decay)[4], float4 score, int lane) {
        const int row = 16 * warp + (lane >> 2);
        *reinterpret_cast<u32*>(s.p + tile_at(row, t) + 4 * (lane & 3)) = pack(score.x * decay[0], score.y * decay[1]);
        *reinterpret_cast<u32*>(s.p + tile_at(row + 8, t) + 4 * (lane & 3)) = pack(score.z * decay[2], score.w * decay[3]);
    };
    // Above the diagonal p is zero, for every head.
#pragma unroll
    for (int t = 2; t < 8; ++t)
        if (t > 2 * warp + 1) write(t, {0.0f, 0.0f, 0.0f, 0.0f}, make_float4(0.0f, 0.0f, 0.0f, 0.0f), own_lane);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
        const int head = key_head * group + member, quarter = member & 3;
        const i64 unit = (i64) slot * p.value_heads + head;
        if (quarter == 0) {
            if (member > 0) __syncthreads();
            __syncthreads();
        }
        {
            const int lane = opaque(own_lane), row0 = 16 * warp + (lane >> 2), column0 = 2 * (lane & 3);
            const float gate[2] = {s.gate[quarter][row0], s.gate[quarter][row0 + 8]};
#pragma unroll
            for (int t = 0; t < 6; ++t)
                if (t < 2 * warp) {
                    float decay[4];
                    decays(decay, gate, *reinterpret_cast<const float2*>(&s.gate[quarter][8 * t + column0]));
                    write(t, decay, scores(t), lane);
                }
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                float decay[4];
                decays_on_diagonal(decay, gate, *reinterpret_cast<const float2*>(&s.gate[quarter][8 * (2 * warp + t) + column0]), lane, t);
                write(2 * warp + t, decay, diagonal_scores(t), lane);
            }
        }
        copy_wait<0>();
        barrier_sync(MULTIPLIER, HALF);
        store_image<HALF, SQUARE_BYTES>(side.p + unit * SQUARE, s.p, thread);
        barrier_sync(INVERSE_READY, THREADS);

        // u^T: this warp's 32 rows of V, all tokens.
        u16* u_to = side.u + unit * TILE;
#pragma unroll 1
        for (int m = 0; m < 2; ++m) {
            const int lane = opaque(own_lane), column0 = 2 * (lane & 3);
            float c[8][4] = {};
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                u32 a[4];
                load_a_trans(a, v_tile, lane, 2 * warp + m, step);
                const float2 left = *reinterpret_cast<const float2*>(&s.beta[quarter][16 * step + column0]);
                const float2 right = *reinterpret_cast<const float2*>(&s.beta[quarter][16 * step + 8 + column0]);
                add_scaled(c[2 * step], c[2 * step + 1], a, left, left, right, right);
#pragma unroll
                for (int block = step; block < 4; ++block) {
                    u32 b[4];
                    load_b_trans(b, for_u, lane, step, block);
                    mma(c[2 * block], a, b[0], b[1]);
                    mma(c[2 * block + 1], a, b[2], b[3]);
                }
            }
            uint4* to = reinterpret_cast<uint4*>(u_to + (2 * warp + m) * 1024) + lane;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                to[32 * i] = make_uint4(pack(c[2 * i][0], c[2 * i][1]), pack(c[2 * i][2], c[2 * i][3]), pack(c[2 * i + 1][0], c[2 * i + 1][1]),
                                        pack(c[2 * i + 1][2], c[2 * i + 1][3]));
        }
        // -w: all tokens, this warp's 32 columns of K, 16 at a time. With the minus, v' is one product that starts from u.
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            const int lane = opaque(own_lane), block = 2 * warp + half;
            float c[4][2][4] = {};
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int row = 16 * m + (lane >> 2);
                const float top = s.beta[quarter][row] * s.decay[quarter][row], bottom = s.beta[quarter][row + 8] * s.decay[quarter][row + 8];
                u32 x[4];
                load_a(x, k_tile, lane, m, block);
                add_scaled(c[m][0], c[m][1], x, make_float2(top, top), make_float2(bottom, bottom), make_float2(top, top), make_float2(bottom, bottom));
            }
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                u32 b[4];
                load_b_trans(b, k_tile, lane, step, block);
#pragma unroll
                for (int m = step; m < 4; ++m) {
                    u32 a[4];
                    load_a_trans(a, for_w, lane, m, step);
                    mma(c[m][0], a, b[0], b[1]);
                    mma(c[m][1], a, b[2], b[3]);
                }
            }
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int t = 0; t < 2; ++t)
#pragma unroll
                    for (int rows8 = 0; rows8 < 2; ++rows8)
                        *reinterpret_cast<u32*>(s.stage + tile_at(16 * m + (lane >> 2) + 8 * rows8, 2 * block + t) + 4 * (lane & 3)) =
                            pack(-c[m][t][2 * rows8], -c[m][t][2 * rows8 + 1]);
        }
        const bool more = member + 1 < group;
        if (more) barrier_arrive(INVERSE_FREE, THREADS);
        barrier_sync(MULTIPLIER, HALF);
        if (more) {
            load_rows<HALF>(v_tile, p.v + token * p.v_token + (i64) (head + 1) * p.v_head, p.v_token, rows, opaque(thread));
            copy_commit();
        }
        store_image<HALF, TILE_BYTES>(side.w + unit * TILE, s.stage, thread);
    }
}

// Chunk `chunk` of a segment, into slot `slot` of one half of the workspace; by thread `self` of the block, which does `meanwhile` when it
// has asked for its inputs.
template <typename Meanwhile>
__device__ __forceinline__ void intra(const Params& p, const Side& side, int slot, const Segment& segment, int chunk, int key_head, char* shared,
                                      int self, const Meanwhile& meanwhile) {
    IntraShared& s = *reinterpret_cast<IntraShared*>(shared);
    const u32 k_tile = shared_address(s.k), stage = shared_address(s.stage);
    const bool solver = self < HALF;
    const int thread = self & (HALF - 1), warp = thread >> 5, lane = self & 31;
    const int group = p.value_heads / p.key_heads;
    const i64 token = segment.tok0 + (i64) chunk * CHUNK;
    const int rows = min(CHUNK, segment.len - chunk * CHUNK);

    load_rows<THREADS>(k_tile, p.k + token * p.k_token + key_head * p.k_head, p.k_token, rows, self);
    load_rows<THREADS>(stage, p.q + token * p.q_token + key_head * p.q_head, p.q_token, rows, self);
    copy_commit();
    if (!solver) load_rows<HALF>(shared_address(s.v), p.v + token * p.v_token + (i64) key_head * group * p.v_head, p.v_token, rows, thread);
    copy_commit();
    meanwhile();
    Gates gates = {};
    if (solver && warp < group) gates = load_gates(p, token, rows, key_head * group + warp, lane);
    copy_wait<1>();
    __syncthreads();
    if (p.flags & L2NORM) {
        normalise_rows(solver ? s.k : s.stage, thread);
        __syncthreads();
    }
    float c[8][4];
    row_products(c, solver ? k_tile : stage, k_tile, warp, lane);

    const i64 key_tile = ((i64) slot * p.key_heads + key_head) * TILE;
    if (solver) {
        store_image<HALF, TILE_BYTES>(side.k + key_tile, s.k, thread);
        solve(p, side, s, c, gates, token, rows, slot, key_head, warp, lane);
    } else {
        store_image<HALF, TILE_BYTES>(side.q + key_tile, s.stage, thread);
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[t][e] *= p.scale;
        multiply(p, side, s, c, token, rows, slot, key_head, warp, lane);
    }
}
