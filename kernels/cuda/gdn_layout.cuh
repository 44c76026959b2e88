// What the host and the blocks of a launch share: parameters, workspace images, and how tiles come out of them.

constexpr int MAX_SLOTS = 64;

// `initial` and `last` of a segment are a slot of a pool, or CARRY; any other negative means zeros, or that nobody asked.
constexpr i32 CARRY = -2;

enum Flags { L2NORM = 1, BETA_ELEMENT = 2, GATE_ELEMENT = 4, INITIAL_BF16 = 8, LAST_BF16 = 16 };

// One sequence's part of a window; kernels/src/window.rs documents the fields.
struct Segment {
    i64 tok0;
    i32 len, slot0, initial, last, chunk0, checkpoint;
};

// One half of the workspace: tile images per (slot, head); w is kept negated, u in accumulator order, gate holds e^G and e^{Glast-G}.
struct Side {
    u16 *q, *k, *w, *u, *p;
    float* gate;
};

struct Params {
    const u16 *q, *k, *v;
    const void *g, *beta;
    u16* o;
    const void* initial;
    void* last;
    const float* carry_in;
    float* carry_out;
    float* checkpoints;
    u16* h;
    u32* progress;
    i64 q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head, g_token, g_head, beta_token, beta_head;
    i64 initial_slot, last_slot;
    Side recur, intra;
    float scale;
    i32 key_heads, value_heads, flags, every, recur_segments, intra_segments, intra_slots, half_slots;
    Segment recur_segment[MAX_SLOTS], intra_segment[MAX_SLOTS];
};

// The segment that a slot belongs to, counted from `part` on.
__device__ __forceinline__ int part_of(const Segment* segments, int count, int slot, int part = 0) {
    while (part + 1 < count && segments[part + 1].slot0 <= slot) ++part;
    return part;
}

// Elements of one image, and floats of one gate row.
constexpr i64 TILE = CHUNK * DIM;
constexpr i64 SQUARE = CHUNK * CHUNK;
constexpr i64 GATES = 2 * CHUNK;
constexpr i64 STATE = DIM * DIM;

// Threads of every block of the prefill, and of half of one: a warpgroup.
constexpr int THREADS = 256;
constexpr int HALF = 128;

// ------------------------------------------------------------------------------------------- fragments out of tile images
// The lane addresses of ldmatrix for a 16x16 block at (row block, column block): as operand a, or as operand b of two 8-wide
// tiles. `_trans` reads the transposed block.

__device__ __forceinline__ u32 address_a(u32 tile, int lane, int row_block, int column_block) {
    return tile + tile_at(16 * row_block + (lane & 15), 2 * column_block + (lane >> 4));
}

__device__ __forceinline__ u32 address_b(u32 tile, int lane, int row_block, int column_block) {
    return tile + tile_at(16 * row_block + ((lane >> 4) << 3) + (lane & 7), 2 * column_block + ((lane >> 3) & 1));
}

__device__ __forceinline__ void load_a(u32 (&a)[4], u32 tile, int lane, int row_block, int column_block) {
    ldmatrix(a, address_a(tile, lane, row_block, column_block));
}

// Operand a is the transpose of what the tile holds: rows of a are the tile's columns.
__device__ __forceinline__ void load_a_trans(u32 (&a)[4], u32 tile, int lane, int row_block, int column_block) {
    ldmatrix_trans(a, address_b(tile, lane, column_block, row_block));
}

// Tile rows are b's columns: b[0..1] is the first 8-wide tile, b[2..3] the second.
__device__ __forceinline__ void load_b(u32 (&b)[4], u32 tile, int lane, int row_block, int column_block) {
    ldmatrix(b, address_b(tile, lane, row_block, column_block));
}

// Tile rows are b's rows.
__device__ __forceinline__ void load_b_trans(u32 (&b)[4], u32 tile, int lane, int row_block, int column_block) {
    ldmatrix_trans(b, address_a(tile, lane, row_block, column_block));
}

// --------------------------------------------------------------------------------------------------------- memory, in bulk

// Loads that pass by the first cache: another block of this launch or of the one before wrote them.
__device__ __forceinline__ uint4 load_fresh(const uint4* from) {
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ float2 load_fresh(const float2* from) {
    float2 x;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
    return x;
}

// A tile of up to 64 token rows into its image; rows past `rows` become zero. By `threads` threads, of which this is `thread`.
template <int threads>
__device__ __forceinline__ void load_rows(u32 tile, const u16* from, i64 stride, int rows, int thread) {
    const int group = thread & 15;
#pragma unroll
    for (int i = 0; i < 1024 / threads; ++i) {
        const int row = (thread >> 4) + threads / 16 * i;
        const bool valid = row < rows;
        copy_async(tile + tile_at(row, group), from + (valid ? row : 0) * stride + 8 * group, valid);
    }
}

template <int threads, int bytes>
__device__ __forceinline__ void load_image(u32 tile, const void* from, int thread) {
#pragma unroll
    for (int i = 0; i < bytes / (16 * threads); ++i) {
        const int at = (i * threads + thread) * 16;
        copy_async(tile + at, static_cast<const char*>(from) + at);
    }
}

template <int threads, int bytes>
__device__ __forceinline__ void store_image(void* to, const char* tile, int thread) {
#pragma unroll
    for (int i = 0; i < bytes / (16 * threads); ++i) {
        const int at = (i * threads + thread) * 16;
        *reinterpret_cast<uint4*>(static_cast<char*>(to) + at) = *reinterpret_cast<const uint4*>(tile + at);
    }
}

