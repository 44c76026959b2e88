// The ring through which all windows of a launch pass.
//
// Instead of one launch a window, the blocks of gdn_stream stay: each recur block walks the chunks of all segments, its state in
// registers throughout, and intra blocks take chunk after chunk. Both halves of the workspace are one ring of slots; chunk `c` of the
// launch lies in slot c mod (2 half_slots). Two words for each slot and key head say how far it is:
//
//     ready   rounds in which an intra block has filled the slot           recur blocks wait for it before they read
//     freed   reads of the slot by recur blocks, all rounds together       intra blocks wait for it before they write
//
// Intra blocks take their items in order of chunks, so the oldest unfinished one always has all it waits for behind it: as long as
// every block of the launch is resident, which a cooperative launch makes sure of, somebody goes on.

#if GDN_HOPPER

// What is counted in the first words: items and walks taken, and blocks that have looked for a walk. Then those of the slots.
enum Taken { ITEMS = 0, WALKS = 1, LOOKED = 2 };
constexpr int PROGRESS_HEAD = 32;

__device__ __forceinline__ u32* ready_of(const Params& p, int at, int key_head) { return p.progress + PROGRESS_HEAD + at * p.key_heads + key_head; }

__device__ __forceinline__ u32* freed_of(const Params& p, int at, int key_head) {
    return ready_of(p, at, key_head) + 2 * p.half_slots * p.key_heads;
}

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ void store_release(u32* to, u32 x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory"); }

__device__ __forceinline__ void add_release(u32* to, u32 x) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory"); }

__device__ __forceinline__ void wait_for(const u32* word, u32 least) {
    while (load_acquire(word) < least) asm volatile("nanosleep.u32 20;");
}

// Between plain stores or loads of global memory and bulk copies of it, on both sides of a handover.
__device__ __forceinline__ void fence_bulk_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// By one thread: a walk for this block, or -1. Two walks share a multiprocessor and none shares one with an intra block (H200: 2.04 us a
// chunk, against 2.18 with one of each on 96 multiprocessors): so blocks of the first multiprocessors take them. When all blocks have
// looked, what is left goes to whoever comes, since those multiprocessors need not hold as many blocks.
__device__ __forceinline__ int take_walk(const Params& p) {
    const u32 walks = (u32) p.value_heads * 2;
    u32 multiprocessor, walk = walks;
    asm("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    if ((int) multiprocessor < p.value_heads) walk = atomicAdd(p.progress + WALKS, 1u);
    __threadfence();
    atomicAdd(p.progress + LOOKED, 1u);
    if (walk >= walks) {
        wait_for(p.progress + LOOKED, gridDim.x);
        if (load_acquire(p.progress + WALKS) < walks) walk = atomicAdd(p.progress + WALKS, 1u);
    }
    return walk < walks ? (int) walk : -1;
}

// An intra block: items (chunk, key head) in order, until there are no more. The next one is taken, and looked after, while the inputs
// of this one are on their way.
__device__ __forceinline__ void intra_stream(const Params& p, char* shared) {
    IntraShared& s = *reinterpret_cast<IntraShared*>(shared);
    const int slots = 2 * p.half_slots;
    // Of an item: the word that tells of its slot's reads, and how many there were when it was last filled.
    const auto freed = [&](int item) { return freed_of(p, item / p.key_heads % slots, item % p.key_heads); };
    const auto reads = [&](int item) { return (u32) (2 * (p.value_heads / p.key_heads) * (item / p.key_heads / slots)); };
    const auto take = [&]() {
        const int item = (int) atomicAdd(p.progress + ITEMS, 1u);
        s.item.x = item;
        s.item.y = item >= p.intra_slots * p.key_heads || load_acquire(freed(item)) >= reads(item);
    };
    if (threadIdx.x == 0) take();
    __syncthreads();
    while (true) {
        const int item = s.item.x, chunk = item / p.key_heads, at = chunk % slots;
        if (chunk >= p.intra_slots) return;
        const int self = opaque(threadIdx.x);
        if (self == 0) {
            if (!s.item.y) wait_for(freed(item), reads(item));
            s.item.z = item;
        }
        __syncthreads();
        const bool second = at >= p.half_slots;
        const Segment& segment = p.recur_segment[part_of(p.recur_segment, p.recur_segments, chunk)];
        intra(p, second ? p.intra : p.recur, second ? at - p.half_slots : at, segment, chunk - segment.slot0, item % p.key_heads, shared, self, [&] {
            if (self == 0) take();
        });
        fence_bulk_copies();
        __syncthreads();
        if (opaque(threadIdx.x) == 0) {
            const int done = s.item.z;
            store_release(ready_of(p, done / p.key_heads % slots, done % p.key_heads), (u32) (done / p.key_heads / slots + 1));
        }
    }
}

#endif
