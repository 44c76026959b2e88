// The same walk on Hopper's own instructions: wgmma reads its second operand straight from shared memory, so that the tiles are read
// once a block and not once a warp, and bulk copies bring whole images in with one instruction each.
//
// One warpgroup owns 64 rows of V; a warp of the other fetches. All four products have V as rows and the state or v'^T as the operand in registers:
//     v'^T = u^T + S^T (-w)^T  o^T = scale (S^T q^T) e^G + v'^T p^T     S^T = e^{Glast} S^T + (e^{Glast-G} v'^T) k
// Tiles pass through a ring of five: w, q, k of a chunk in turn. When a chunk's w and q have been read, the fetcher asks for k of the next
// chunk and w of the one after it; for that one's q, p and gates when all of the chunk has been.

#if GDN_HOPPER

struct HopperShared {
    char ring[5][TILE_BYTES];
    char p[2][SQUARE_BYTES];
    float gate[2][GATES];
    char o[4][CHUNK * 32];
    // Barriers, by turns of chunks: its w is there; q, p and gates are; its k is; w and q have been read; all of it has; and, of a ring,
    // it may be fetched. By turns, since two chunks may pass while one who waits is at something else.
    u64 first[2], early[2], late[2], q_read[2], all_read[2], told[2];
};

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_tell(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Registers move from the fetching warpgroup to the other: 32 + 224 is what two threads of 128 have.
__device__ __forceinline__ void keep_few_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 32;"); }
__device__ __forceinline__ void take_more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 224;"); }

// Shared memory as an operand, 128-byte swizzle: panels of 128 bytes a row, groups of 8 rows 1024 bytes apart. `panel` is the distance
// to the next panel, used only where rows run along the sum.
__device__ __forceinline__ u64 operand(u32 address, u32 panel) {
    return (u64) ((address & 0x3ffff) >> 4) | (u64) (panel >> 4) << 16 | (u64) (1024 >> 4) << 32 | (u64) 1 << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving or copying registers that the tensor cores are still using.
template <int tiles>
__device__ __forceinline__ void hold(float (&c)[tiles][4]) {
#pragma unroll
    for (int t = 0; t < tiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[t][e])::"memory");
}

#define GDN_TILE(c, t) "+f"(c[t][0]), "+f"(c[t][1]), "+f"(c[t][2]), "+f"(c[t][3])
#if GDN_FP16
#define GDN_ELEMENTS "f16.f16"
#else
#define GDN_ELEMENTS "bf16.bf16"
#endif

// c (+)= a b^T: 64 x 64, sixteen along the sum; b's rows are c's columns.
__device__ __forceinline__ void wgmma_64(float (&c)[8][4], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." GDN_ELEMENTS " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, add, 1, 1, 0; }"
        : GDN_TILE(c, 0), GDN_TILE(c, 1), GDN_TILE(c, 2), GDN_TILE(c, 3), GDN_TILE(c, 4), GDN_TILE(c, 5), GDN_TILE(c, 6), GDN_TILE(c, 7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// c += a b: 64 x 128, sixteen along the sum; b's columns are c's columns.
__device__ __forceinline__ void wgmma_128(float (&c)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." GDN_ELEMENTS " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
        : GDN_TILE(c, 0), GDN_TILE(c, 1), GDN_TILE(c, 2), GDN_TILE(c, 3), GDN_TILE(c, 4), GDN_TILE(c, 5), GDN_TILE(c, 6), GDN_TILE(c, 7), GDN_TILE(c, 8),
          GDN_TILE(c, 9), GDN_TILE(c, 10), GDN_TILE(c, 11), GDN_TILE(c, 12), GDN_TILE(c, 13), GDN_TILE(c, 14), GDN_TILE(c, 15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Four 8x8 blocks, each transposed, to shared memory; a lane gives the address of one row of one block.
__device__ __forceinline__ void stmatrix_trans(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// `streamed`: all segments of the launch, whose chunks pass through the ring of gdn_stream.cuh; otherwise the segment `part` alone,
// whose chunks lie in the recur half.
template <bool streamed>
__device__ __forceinline__ void recur_sm90(const Params& p, int part, int head, int slice, char* shared) {
    HopperShared& s = *reinterpret_cast<HopperShared*>(shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int key_head = head / (p.value_heads / p.key_heads);
    const int first_slot = p.recur_segment[part].slot0, ring_slots = 2 * p.half_slots;
    const int total = streamed ? p.intra_slots : (p.recur_segment[part].len + CHUNK - 1) / CHUNK;
    const int v_block = 4 * slice + warp;
    const u32 ring = shared_address(s.ring), barriers = shared_address(s.first);
    const auto first = [&](int c) { return barriers + 8 * (c & 1); };
    const auto early = [&](int c) { return barriers + 16 + 8 * (c & 1); };
    const auto late = [&](int c) { return barriers + 32 + 8 * (c & 1); };
    const auto q_read = [&](int c) { return barriers + 48 + 8 * (c & 1); };
    const auto all_read = [&](int c) { return barriers + 64 + 8 * (c & 1); };
    const auto told = [&](int c) { return barriers + 80 + 8 * (c & 1); };
    const auto wait = [](u32 barrier, int c) { barrier_wait(barrier, c >> 1 & 1); };

    // Chunk `c`, of `total`: where in the workspace, and where in shared memory its tile `i` (w, q, k), the (3c + i)th to pass.
    const auto slot_of = [&](int c) { return streamed ? c % ring_slots : first_slot + c; };
    const auto side_of = [&](int slot) -> const Side& { return streamed && slot >= p.half_slots ? p.intra : p.recur; };
    const auto unit_of = [&](int slot, int heads, int own) { return (i64) (streamed && slot >= p.half_slots ? slot - p.half_slots : slot) * heads + own; };
    const auto tile = [&](int c, int i) { return ring + (u32) ((3 * c + i) % 5) * TILE_BYTES; };

    if (threadIdx.x == 0) {
        for (int c = 0; c < 2; ++c) {
            barrier_init(first(c), 1), barrier_init(early(c), 1), barrier_init(late(c), 1), barrier_init(told(c), 1);
            barrier_init(q_read(c), streamed ? 5 : 4), barrier_init(all_read(c), streamed ? 5 : 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= HALF) {
        keep_few_registers();
        // What is heard from and said to other blocks takes as long as a chunk, so a warp each does it beside the one that fetches. Who
        // waits at a barrier must see each of its phases, or would take a later one for it: so these two arrive with the readers, having
        // seen the phase before, and nobody is told of a chunk before all have acted on the one two before.
        if (streamed && threadIdx.x == HALF + 32) {
            barrier_tell(q_read(0)), barrier_tell(q_read(1));
            for (int c = 0; c < total; ++c) {
                if (c > 2) {
                    wait(q_read(c - 3), c - 3);
                    barrier_tell(q_read(c - 1));
                }
                wait_for(ready_of(p, slot_of(c), key_head), (u32) (c / ring_slots + 1));
                fence_bulk_copies();
                if (c > 1) wait(first(c - 2), c - 2);
                barrier_tell(told(c));
            }
        }
        if (streamed && threadIdx.x == HALF + 64) {
            barrier_tell(all_read(0)), barrier_tell(all_read(1));
            for (int c = 0; c + 2 < total; ++c) {
                wait(all_read(c), c);
                barrier_tell(all_read(c + 2));
                add_release(freed_of(p, slot_of(c), key_head), 1);
            }
        }
        const auto load_first = [&](int c) {
            if (streamed) wait(told(c), c);
            const int slot = slot_of(c);
            barrier_expect(first(c), TILE_BYTES);
            bulk_copy(tile(c, 0), side_of(slot).w + unit_of(slot, p.value_heads, head) * TILE, TILE_BYTES, first(c));
        };
        const auto load_early = [&](int c) {
            const int slot = slot_of(c);
            const Side& side = side_of(slot);
            const i64 unit = unit_of(slot, p.value_heads, head);
            barrier_expect(early(c), TILE_BYTES + SQUARE_BYTES + GATES * 4);
            bulk_copy(shared_address(s.gate[c & 1]), side.gate + unit * GATES, GATES * 4, early(c));
            bulk_copy(tile(c, 1), side.q + unit_of(slot, p.key_heads, key_head) * TILE, TILE_BYTES, early(c));
            bulk_copy(shared_address(s.p[c & 1]), side.p + unit * SQUARE, SQUARE_BYTES, early(c));
        };
        const auto load_late = [&](int c) {
            const int slot = slot_of(c);
            barrier_expect(late(c), TILE_BYTES);
            bulk_copy(tile(c, 2), side_of(slot).k + unit_of(slot, p.key_heads, key_head) * TILE, TILE_BYTES, late(c));
        };
        if (threadIdx.x == HALF && total > 0) {
            load_first(0);
            load_early(0);
            load_late(0);
            if (total > 1) {
                load_first(1);
                load_early(1);
            }
            for (int c = 0; c + 1 < total; ++c) {
                wait(q_read(c), c);
                load_late(c + 1);
                if (c + 2 < total) {
                    load_first(c + 2);
                    wait(all_read(c), c);
                    load_early(c + 2);
                }
            }
        }
        return;
    }
    take_more_registers();
    const i64 state_at = (i64) head * STATE + (16 * v_block + (lane >> 2)) * DIM + 2 * (lane & 3);
    uint4 u[4];
    const auto load_u = [&](int slot) {
        const uint4* from = reinterpret_cast<const uint4*>(side_of(slot).u + unit_of(slot, p.value_heads, head) * TILE + v_block * 1024) + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) u[i] = load_fresh(from + 32 * i);
    };
    // The slot of the chunk whose u comes next.
    int slot = streamed ? 0 : first_slot;
    if (!streamed && total > 0) load_u(slot);
    StateTiles state;
    int c = 0;
    for (const int end = streamed ? p.recur_segments : part + 1; part < end; ++part) {
        const Segment& segment = p.recur_segment[part];
        const int chunks = (segment.len + CHUNK - 1) / CHUNK;
        begin_state(state, p, segment, state_at);
        if (streamed && c == 0 && total > 0) {
            wait(first(0), 0);
            load_u(0);
        }
        for (int chunk = 0; chunk < chunks; ++chunk, ++c) {
            const int side = c & 1;
            u32 rounded[8][4];
            round_state(rounded, state);
            wait(first(c), c);

            // v'^T = u^T + S^T (-w)^T, then o^T = S^T q^T.
            float v[8][4], o[8][4];
            start_from(v, u);
            if (c + 1 < total) {
                ++slot;
                if (streamed) {
                    if (slot == ring_slots) slot = 0;
                    wait(told(c + 1), c + 1);
                }
                load_u(slot);
            }
            hold(v), hold(o);
            wgmma_begin();
            const u64 w_tile = operand(tile(c, 0), 0), q_tile = operand(tile(c, 1), 0);
#pragma unroll
            for (int step = 0; step < 8; ++step) wgmma_64(v, rounded[step], w_tile + (step >> 2) * (8192 >> 4) + (step & 3) * 2, 1);
            wgmma_commit();
            wait(early(c), c);
#pragma unroll
            for (int step = 0; step < 8; ++step) wgmma_64(o, rounded[step], q_tile + (step >> 2) * (8192 >> 4) + (step & 3) * 2, step);
            wgmma_commit();
            const float* gate = s.gate[side];
            const float carry = gate[CHUNK - 1];
            wgmma_wait<1>();
            hold(v);

            u32 plain[4][4], decayed[4][4];
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                const float2 decay = *reinterpret_cast<const float2*>(gate + CHUNK + 8 * t + 2 * (lane & 3));
                plain[t >> 1][2 * (t & 1)] = pack(v[t][0], v[t][1]);
                plain[t >> 1][2 * (t & 1) + 1] = pack(v[t][2], v[t][3]);
                decayed[t >> 1][2 * (t & 1)] = pack(v[t][0] * decay.x, v[t][1] * decay.y);
                decayed[t >> 1][2 * (t & 1) + 1] = pack(v[t][2] * decay.x, v[t][3] * decay.y);
            }
#ifdef GDN_MUTANT_CHAIN
            const bool window_ends = streamed && (c + 1) % p.half_slots == 0 && chunk + 1 < chunks;
            const bool skip = window_ends || (chunk + 1 == chunks && segment.last == CARRY);
#else
            const bool skip = false;
#endif
            if (!skip) {
#pragma unroll
                for (int t = 0; t < 16; ++t)
#pragma unroll
                    for (int e = 0; e < 4; ++e) state[t][e] *= carry;
            }
            wgmma_wait<0>();
            hold(o);
            if (lane == 0) barrier_tell(q_read(c));
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                const float2 decay = *reinterpret_cast<const float2*>(gate + 8 * t + 2 * (lane & 3));
                o[t][0] *= decay.x * p.scale, o[t][1] *= decay.y * p.scale;
                o[t][2] *= decay.x * p.scale, o[t][3] *= decay.y * p.scale;
            }

            // o^T += v'^T p^T, then S^T += (e^{Glast-G} v'^T) k while o goes out.
            hold(o), hold(state);
            wgmma_begin();
            const u64 p_tile = operand(shared_address(s.p[side]), 0), k_tile = operand(tile(c, 2), 8192);
#pragma unroll
            for (int step = 0; step < 4; ++step) wgmma_64(o, plain[step], p_tile + step * 2, 1);
            wgmma_commit();
            wait(late(c), c);
            if (!skip) {
#pragma unroll
                for (int step = 0; step < 4; ++step) wgmma_128(state, decayed[step], k_tile + step * (2048 >> 4));
            }
            wgmma_commit();
            wgmma_wait<1>();
            hold(o);
            const i64 token = segment.tok0 + (i64) chunk * CHUNK;
            const int rows = min(CHUNK, segment.len - chunk * CHUNK);
            __syncwarp();
#pragma unroll
            for (int t = 0; t < 8; t += 2)
                stmatrix_trans(shared_address(s.o[warp]) + (8 * t + (lane & 7) + 8 * (lane >> 4)) * 32 + 16 * ((lane >> 3) & 1), pack(o[t][0], o[t][1]),
                               pack(o[t][2], o[t][3]), pack(o[t + 1][0], o[t + 1][1]), pack(o[t + 1][2], o[t + 1][3]));
            __syncwarp();
            write_rows<4>(p, s.o[warp], token, rows, head, 16 * v_block, lane);
            wgmma_wait<0>();
            hold(state);
            if (lane == 0) barrier_tell(all_read(c));

            keep_checkpoint(state, p, segment, chunk, rows, state_at);
        }
        end_state(state, p, segment, state_at);
    }
}

#endif
