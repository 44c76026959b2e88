// The walk over the chunks of one (sequence, value head), on mma.sync: every architecture since sm_80.
//
// A warp owns 16 rows of V of the state S^T for the whole walk. Accumulators and operands of mma.sync have one layout, so the state
// goes from sums to operand without leaving its registers:
//     v'^T = u^T + S^T (-w)^T  a: S^T, b: -w           o = q S + p v'     a: q and p, b: S and v' (their columns are pairs here)
//     S^T += v'^T k            a: v'^T, b: k

// w, q and the gates are loaded a chunk ahead; k and p, needed half a chunk later, when their chunk begins. 89 KB a block: two blocks
// share a multiprocessor of 228 KB, and one fits where a block may have 99 KB.
struct RecurShared {
    struct {
        char w[TILE_BYTES];
        char q[TILE_BYTES];
        float gate[GATES];
    } early[2];
    struct {
        char k[TILE_BYTES];
        char p[SQUARE_BYTES];
    } late;
    char o[8][CHUNK / 2 * 32];
};

// The state's rows of one lane: S^T [V,K] in accumulator order.
using StateTiles = float[16][4];

// All loads are under way before the first is waited for: one branch for all, since waiting is not predicated.
__device__ __forceinline__ void load_state(StateTiles& state, const void* from, i64 at, bool is_bf16) {
    if (is_bf16) {
        const u16* row = static_cast<const u16*>(from) + at;
        u32 pair[16][2];
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) pair[t][half] = *reinterpret_cast<const u32*>(row + half * 8 * DIM + 8 * t);
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                state[t][2 * half] = bf16_low(pair[t][half]), state[t][2 * half + 1] = bf16_high(pair[t][half]);
    } else {
        const float* row = static_cast<const float*>(from) + at;
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 pair = load_fresh(reinterpret_cast<const float2*>(row + half * 8 * DIM + 8 * t));
                state[t][2 * half] = pair.x, state[t][2 * half + 1] = pair.y;
            }
    }
}

__device__ __forceinline__ void store_state(const StateTiles& state, void* to, i64 at, bool is_bf16) {
#pragma unroll
    for (int t = 0; t < 16; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const i64 index = at + half * 8 * DIM + 8 * t;
            if (is_bf16)
                *reinterpret_cast<u32*>(static_cast<u16*>(to) + index) = pack_bf16(state[t][2 * half], state[t][2 * half + 1]);
            else
                *reinterpret_cast<float2*>(static_cast<float*>(to) + index) = make_float2(state[t][2 * half], state[t][2 * half + 1]);
        }
}

// Where a segment's state comes from; `at` is the lane's place in a head's state.
__device__ __forceinline__ void begin_state(StateTiles& state, const Params& p, const Segment& segment, i64 at) {
    if (segment.initial == CARRY) {
        load_state(state, p.carry_in, at, false);
    } else if (segment.initial >= 0) {
        load_state(state, p.initial, segment.initial * p.initial_slot + at, p.flags & INITIAL_BF16);
    } else {
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) state[t][e] = 0.0f;
    }
}

// Where it goes.
__device__ __forceinline__ void end_state(const StateTiles& state, const Params& p, const Segment& segment, i64 at) {
    if (segment.last == CARRY)
        store_state(state, p.carry_out, at, false);
    else if (segment.last >= 0)
        store_state(state, p.last, segment.last * p.last_slot + at, p.flags & LAST_BF16);
}

// The state after a whole chunk, where one is asked for there.
__device__ __forceinline__ void keep_checkpoint(const StateTiles& state, const Params& p, const Segment& segment, int chunk, int rows, i64 at) {
    const int done = segment.chunk0 + chunk + 1;
    if (segment.checkpoint >= 0 && rows == CHUNK && done % p.every == 0)
        store_state(state, p.checkpoints, (i64) (segment.checkpoint + done / p.every - 1) * p.value_heads * STATE + at, false);
}

// The state rounded to elements: operand a of S^T w^T, and, as pairs of columns, operand b of q S.
__device__ __forceinline__ void round_state(u32 (&rounded)[8][4], const StateTiles& state) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        rounded[t][0] = pack(state[2 * t][0], state[2 * t][1]);
        rounded[t][1] = pack(state[2 * t][2], state[2 * t][3]);
        rounded[t][2] = pack(state[2 * t + 1][0], state[2 * t + 1][1]);
        rounded[t][3] = pack(state[2 * t + 1][2], state[2 * t + 1][3]);
    }
}

// v = u as sums, out of the order in which intra blocks leave it.
__device__ __forceinline__ void start_from(float (&v)[8][4], const uint4 (&u)[4]) {
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
        const uint4 four = u[t >> 1];
        v[t][0] = low(four.x), v[t][1] = high(four.x), v[t][2] = low(four.y), v[t][3] = high(four.y);
        v[t + 1][0] = low(four.z), v[t + 1][1] = high(four.z), v[t + 1][2] = low(four.w), v[t + 1][3] = high(four.w);
    }
}

// o = scale e^G (q S) : all tokens, this warp's 16 rows of V.
__device__ __forceinline__ void read_state(float (&o)[4][2][4], const u32 (&rounded)[8][4], u32 q_tile, const float* decay, float scale, int lane) {
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[m][t][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < 8; ++step)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            u32 a[4];
            load_a(a, q_tile, lane, m, step);
            mma(o[m][0], a, rounded[step][0], rounded[step][2]);
            mma(o[m][1], a, rounded[step][1], rounded[step][3]);
        }
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float factor = decay[16 * m + 8 * half + (lane >> 2)] * scale;
#pragma unroll
            for (int t = 0; t < 2; ++t) o[m][t][2 * half] *= factor, o[m][t][2 * half + 1] *= factor;
        }
}

// o += p v', with v' as pairs of tokens: v[i] holds tokens 8i + 2 (lane mod 4) of V rows lane / 4 and + 8.
__device__ __forceinline__ void read_chunk(float (&o)[4][2][4], const u32 (&v)[8][2], u32 p_tile, int lane) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int m = step; m < 4; ++m) {
            u32 a[4];
            load_a(a, p_tile, lane, m, step);
            mma(o[m][0], a, v[2 * step][0], v[2 * step + 1][0]);
            mma(o[m][1], a, v[2 * step][1], v[2 * step + 1][1]);
        }
}

// One warp's 16 columns of o for 16 `blocks` tokens, staged as 32 bytes a token, to their rows: whole sectors at a time.
template <int blocks>
__device__ __forceinline__ void write_rows(const Params& p, const char* staged, i64 token, int rows, int head, int column, int lane) {
    u16* to = p.o + token * p.o_token + head * p.o_head + column + 8 * (lane & 1);
#pragma unroll
    for (int i = 0; i < blocks; ++i) {
        const int row = 16 * i + (lane >> 1);
        if (row < rows) *reinterpret_cast<uint4*>(to + row * p.o_token) = *reinterpret_cast<const uint4*>(staged + 512 * i + 16 * lane);
    }
}

// A chunk's output of one warp, half of the tokens at a time.
__device__ __forceinline__ void write_output(const Params& p, const float (&o)[4][2][4], char* staged, i64 token, int rows, int head, int column,
                                             int lane) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        __syncwarp();
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int t = 0; t < 2; ++t)
                    *reinterpret_cast<u32*>(staged + (16 * m + 8 * half + (lane >> 2)) * 32 + 16 * t + 4 * (lane & 3)) =
                        pack(o[2 * part + m][t][2 * half], o[2 * part + m][t][2 * half + 1]);
        __syncwarp();
        write_rows<2>(p, staged, token + 32 * part, rows - 32 * part, head, column, lane);
    }
}

template <bool staged>
__device__ __forceinline__ void recur(const Params& p, int part, int head, char* shared) {
    RecurShared& s = *reinterpret_cast<RecurShared*>(shared);
    const Segment& segment = p.recur_segment[part];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int key_head = head / (p.value_heads / p.key_heads);
    const int chunks = (segment.len + CHUNK - 1) / CHUNK;
    const int v_block = warp;
    const i64 state_at = (i64) head * STATE + (16 * v_block + (lane >> 2)) * DIM + 2 * (lane & 3);

    const auto load_early = [&](int chunk) {
        const i64 unit = (i64) (segment.slot0 + chunk) * p.value_heads + head;
        const i64 key_unit = (i64) (segment.slot0 + chunk) * p.key_heads + key_head;
        auto& to = s.early[chunk & 1];
        load_image<THREADS, TILE_BYTES>(shared_address(to.w), p.recur.w + unit * TILE, threadIdx.x);
        if (!staged) load_image<THREADS, TILE_BYTES>(shared_address(to.q), p.recur.q + key_unit * TILE, threadIdx.x);
        if (threadIdx.x < GATES / 4) copy_async(shared_address(to.gate) + 16 * threadIdx.x, p.recur.gate + unit * GATES + 4 * threadIdx.x);
    };
    const auto load_late = [&](int chunk) {
        const i64 unit = (i64) (segment.slot0 + chunk) * p.value_heads + head;
        const i64 key_unit = (i64) (segment.slot0 + chunk) * p.key_heads + key_head;
        load_image<THREADS, TILE_BYTES>(shared_address(s.late.k), p.recur.k + key_unit * TILE, threadIdx.x);
        if (!staged) load_image<THREADS, SQUARE_BYTES>(shared_address(s.late.p), p.recur.p + unit * SQUARE, threadIdx.x);
    };
    const auto u_of = [&](int chunk) {
        return reinterpret_cast<uint4*>(p.recur.u + ((i64) (segment.slot0 + chunk) * p.value_heads + head) * TILE + v_block * 1024) + lane;
    };

    uint4 u[4];
    if (chunks > 0) {
        load_early(0);
        copy_commit();
#pragma unroll
        for (int i = 0; i < 4; ++i) u[i] = load_fresh(u_of(0) + 32 * i);
    }
    StateTiles state;
    begin_state(state, p, segment, state_at);

    for (int chunk = 0; chunk < chunks; ++chunk) {
        const auto& early = s.early[chunk & 1];
        const bool more = chunk + 1 < chunks;
        copy_wait<0>();
        __syncthreads();
        load_late(chunk);
        copy_commit();
        if (more) load_early(chunk + 1);
        copy_commit();

        u32 rounded[8][4];
        round_state(rounded, state);
        if (staged) {
            u16* to = p.h + ((i64) (segment.slot0 + chunk) * p.value_heads) * STATE + state_at;
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                *reinterpret_cast<u32*>(to + 16 * t) = rounded[t][0];
                *reinterpret_cast<u32*>(to + 8 * DIM + 16 * t) = rounded[t][1];
                *reinterpret_cast<u32*>(to + 16 * t + 8) = rounded[t][2];
                *reinterpret_cast<u32*>(to + 8 * DIM + 16 * t + 8) = rounded[t][3];
            }
        }

        // v'^T = u^T + S^T (-w)^T
        float v[8][4];
        start_from(v, u);
        const u32 w_tile = shared_address(early.w);
#pragma unroll
        for (int step = 0; step < 8; ++step)
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                u32 b[4];
                load_b(b, w_tile, lane, block, step);
                mma(v[2 * block], rounded[step], b[0], b[1]);
                mma(v[2 * block + 1], rounded[step], b[2], b[3]);
            }
        float o[4][2][4];
        if (!staged) read_state(o, rounded, shared_address(early.q), early.gate, p.scale, lane);

        u32 plain[8][2], decayed[4][4];
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            plain[t][0] = pack(v[t][0], v[t][1]), plain[t][1] = pack(v[t][2], v[t][3]);
            const float2 decay = *reinterpret_cast<const float2*>(&early.gate[CHUNK + 8 * t + 2 * (lane & 3)]);
            decayed[t >> 1][2 * (t & 1)] = pack(v[t][0] * decay.x, v[t][1] * decay.y);
            decayed[t >> 1][2 * (t & 1) + 1] = pack(v[t][2] * decay.x, v[t][3] * decay.y);
        }
        if (staged) {
#pragma unroll
            for (int i = 0; i < 4; ++i) u_of(chunk)[32 * i] = make_uint4(plain[2 * i][0], plain[2 * i][1], plain[2 * i + 1][0], plain[2 * i + 1][1]);
        }
        if (more) {
#pragma unroll
            for (int i = 0; i < 4; ++i) u[i] = load_fresh(u_of(chunk + 1) + 32 * i);
        }
        copy_wait<1>();
        __syncthreads();

        // S^T = e^{Glast} S^T + (e^{Glast-G} v')^T k ; G is held past the last row, so its last entry is Glast.
        const float carry = early.gate[CHUNK - 1];
        const u32 k_tile = shared_address(s.late.k);
#ifdef GDN_MUTANT_CHAIN
        if (!more && segment.last == CARRY) break;
#endif
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) state[t][e] *= carry;
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int block = 0; block < 8; ++block) {
                u32 b[4];
                load_b_trans(b, k_tile, lane, step, block);
                mma(state[2 * block], decayed[step], b[0], b[1]);
                mma(state[2 * block + 1], decayed[step], b[2], b[3]);
            }

        const i64 token = segment.tok0 + (i64) chunk * CHUNK;
        const int rows = min(CHUNK, segment.len - chunk * CHUNK);
        if (!staged) {
            read_chunk(o, plain, shared_address(s.late.p), lane);
            write_output(p, o, s.o[warp], token, rows, head, 16 * v_block, lane);
        }
        keep_checkpoint(state, p, segment, chunk, rows, state_at);
    }

    end_state(state, p, segment, state_at);
}

