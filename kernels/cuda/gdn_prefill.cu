// Gated DeltaNet prefill, one window of chunks at a time.
//
// A chunk is 64 tokens of one sequence. Two kinds of block (256 threads each) share a launch:
//
//   intra  one (chunk, key head): what needs only this chunk's tokens. Normalises q and k, then for each value head of the group
//          builds L = beta k k^T decay, its unit inverse A, and writes  w = A (beta e^G k),  u = A (beta v),  p = scale q k^T decay.
//   recur  one (sequence in the window, value head, on Hopper half of V): walks the chunks in order with the state S^T [V,K] in registers:
//              v' = u - w S      o = scale e^G q S + p v'      S = e^{Glast} S + k^T (e^{Glast-G} v')
//
// In gdn_stream, on Hopper, the blocks stay for the whole prompt and both halves of the workspace are one ring of slots
// (gdn_stream.cuh). In gdn_window, launch i holds the recur blocks of window i-1 and the intra blocks of window i, each with a half
// of its own. Either way the serial walk hides the parallel work. G is the inclusive sum of the log decay inside the chunk, in units of
// log2. Rows past the end of a sequence count as g = 0, beta = 0 and q = k = v = 0, so G stays at its last valid value.
//
// Every sum is made in an order that depends on the chunk alone: no window, neighbour or grid size changes a bit of the result.
// The same holds for the staged design (gdn_intra, gdn_recur, gdn_output), which also keeps the state at each chunk's start.

// Two blocks share a multiprocessor where shared memory allows it, so that intra blocks fill the gaps of the walk. Hopper's walk moves
// registers between its warpgroups; elsewhere one block may have them all.
#if GDN_HOPPER
constexpr int BLOCKS = 2, SLICES = 2;
#else
constexpr int BLOCKS = 1, SLICES = 1;
#endif

// Block `block` of a launch's intra blocks (slots x key heads).
__device__ __forceinline__ void intra_in_window(const Params& p, int block, char* shared) {
    const int slot = block / p.key_heads;
    const Segment& segment = p.intra_segment[part_of(p.intra_segment, p.intra_segments, slot)];
    intra(p, p.intra, slot, segment, slot - segment.slot0, block % p.key_heads, shared, threadIdx.x, [] {});
}

// Grid: recur blocks (segments x value heads x slices of V), then intra blocks (slots x key heads).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gdn_window(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char shared[];
    const int walks = p.recur_segments * p.value_heads * SLICES;
    const int block = blockIdx.x;
    if (block < walks) {
        const int part = block / (SLICES * p.value_heads), head = block / SLICES % p.value_heads;
#if GDN_HOPPER
        recur_sm90<false>(p, part, head, block % SLICES, shared);
#else
        recur<false>(p, part, head, shared);
#endif
    } else {
        intra_in_window(p, block - walks, shared);
    }
}

#if GDN_HOPPER
// All windows of up to 64 segments in one launch. Grid: as many blocks as the device holds, all resident at once; which of them walk
// (value heads x slices of V) and which are intra blocks they settle among themselves.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gdn_stream(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char shared[];
    IntraShared& s = *reinterpret_cast<IntraShared*>(shared);
    if (threadIdx.x == 0) s.item.x = take_walk(p);
    __syncthreads();
    const int walk = s.item.x;
    __syncthreads();
    if (walk < 0)
        intra_stream(p, shared);
    else
        recur_sm90<true>(p, 0, walk / SLICES, walk % SLICES, shared);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gdn_intra(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char shared[];
    intra_in_window(p, blockIdx.x, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gdn_recur(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char shared[];
    recur<true>(p, blockIdx.x / p.value_heads, blockIdx.x % p.value_heads, shared);
}

struct OutputShared {
    char q[TILE_BYTES];
    char p[SQUARE_BYTES];
    float gate[GATES];
    char o[8][CHUNK / 2 * 32];
};

// The output of the staged design, from the kept states and v'. Grid: slots x value heads.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gdn_output(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char shared[];
    OutputShared& s = *reinterpret_cast<OutputShared*>(shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int slot = blockIdx.x / p.value_heads, head = blockIdx.x % p.value_heads;
    const int key_head = head / (p.value_heads / p.key_heads);
    const int v_block = warp;
    const Segment& segment = p.recur_segment[part_of(p.recur_segment, p.recur_segments, slot)];
    const int chunk = slot - segment.slot0;
    const i64 unit = (i64) slot * p.value_heads + head;

    load_image<THREADS, TILE_BYTES>(shared_address(s.q), p.recur.q + ((i64) slot * p.key_heads + key_head) * TILE, threadIdx.x);
    load_image<THREADS, SQUARE_BYTES>(shared_address(s.p), p.recur.p + unit * SQUARE, threadIdx.x);
    if (threadIdx.x < GATES / 4) copy_async(shared_address(s.gate) + 16 * threadIdx.x, p.recur.gate + unit * GATES + 4 * threadIdx.x);
    copy_commit();

    u32 rounded[8][4], v[8][2];
    const u16* h = p.h + unit * STATE + (16 * v_block + (lane >> 2)) * DIM + 2 * (lane & 3);
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        rounded[t][0] = *reinterpret_cast<const u32*>(h + 16 * t);
        rounded[t][1] = *reinterpret_cast<const u32*>(h + 8 * DIM + 16 * t);
        rounded[t][2] = *reinterpret_cast<const u32*>(h + 16 * t + 8);
        rounded[t][3] = *reinterpret_cast<const u32*>(h + 8 * DIM + 16 * t + 8);
    }
    const uint4* u = reinterpret_cast<const uint4*>(p.recur.u + unit * TILE + v_block * 1024) + lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 four = u[32 * i];
        v[2 * i][0] = four.x, v[2 * i][1] = four.y, v[2 * i + 1][0] = four.z, v[2 * i + 1][1] = four.w;
    }
    copy_wait<0>();
    __syncthreads();
    float o[4][2][4];
    read_state(o, rounded, shared_address(s.q), s.gate, p.scale, lane);
    read_chunk(o, v, shared_address(s.p), lane);
    write_output(p, o, s.o[warp], segment.tok0 + (i64) chunk * CHUNK, min(CHUNK, segment.len - chunk * CHUNK), head, 16 * v_block, lane);
}
