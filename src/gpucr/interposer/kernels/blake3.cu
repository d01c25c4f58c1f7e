/*
 * Names pieces of device memory where they are: BLAKE3, keyed or not, as a store does (store/pieces.py). Algorithm: the
 * BLAKE3 paper (2020), section 2. `scripts/kernels` makes blake3.ptx of it.
 *
 * `data` begins a piece each `piece_bytes` (a multiple of 1024, at most 64 MiB); the last one may be shorter. A block of
 * the first kernel makes one chaining value of a group of 256 chunks, the second one joins the groups of a piece.
 * Neighbours are paired level by level, and an odd last one moves up as it is: that gives BLAKE3's tree.
 */
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };
enum { BLOCK_BYTES = 64, CHUNK_BYTES = 1024, GROUP_CHUNKS = 256, GROUP_BYTES = GROUP_CHUNKS * CHUNK_BYTES };

__device__ __forceinline__ void mix(u32 &a, u32 &b, u32 &c, u32 &d, u32 x, u32 y) {
    a += b + x;
    d = __byte_perm(d ^ a, 0, 0x1032); /* rotated by 16 */
    c += d;
    b = __funnelshift_r(b ^ c, b ^ c, 12);
    a += b + y;
    d = __byte_perm(d ^ a, 0, 0x0321); /* by 8 */
    c += d;
    b = __funnelshift_r(b ^ c, b ^ c, 7);
}

/* Seven rounds, unrolled, so that the order of the words is known when this is compiled. */
__device__ __forceinline__ void compress(u32 value[8], const u32 words[16], u64 counter, u32 length, u32 flags) {
    const u8 ORDER[7][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
        {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
        {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
        {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
    };
    u32 s[16] = {value[0], value[1], value[2], value[3], value[4], value[5], value[6], value[7],
                 0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, (u32)counter, (u32)(counter >> 32), length, flags};
#pragma unroll
    for (int round = 0; round < 7; round++) {
        const u8 *o = ORDER[round];
        mix(s[0], s[4], s[8], s[12], words[o[0]], words[o[1]]);
        mix(s[1], s[5], s[9], s[13], words[o[2]], words[o[3]]);
        mix(s[2], s[6], s[10], s[14], words[o[4]], words[o[5]]);
        mix(s[3], s[7], s[11], s[15], words[o[6]], words[o[7]]);
        mix(s[0], s[5], s[10], s[15], words[o[8]], words[o[9]]);
        mix(s[1], s[6], s[11], s[12], words[o[10]], words[o[11]]);
        mix(s[2], s[7], s[8], s[13], words[o[12]], words[o[13]]);
        mix(s[3], s[4], s[9], s[14], words[o[14]], words[o[15]]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        value[i] = s[i] ^ s[i + 8];
}

/* 64 bytes, of which `length` are there. */
__device__ __forceinline__ void load(u32 words[16], const u8 *from, u32 length) {
    if (length == BLOCK_BYTES && ((u64)from & 15) == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 four = __ldcs((const uint4 *)from + i); /* read once */
            words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        words[i] = 0;
        for (int byte = 0; byte < 4; byte++)
            if (4 * i + byte < length)
                words[i] |= (u32)from[4 * i + byte] << 8 * byte;
    }
}

__device__ __forceinline__ void hash_chunk(u32 value[8], const u8 *from, u32 length, u64 counter, u32 flags, bool is_root) {
    u32 words[16];
    u32 blocks = length == 0 ? 1 : (length + BLOCK_BYTES - 1) / BLOCK_BYTES;
#pragma unroll 1
    for (u32 i = 0; i < blocks; i++) {
        bool is_last = i == blocks - 1;
        u32 size = is_last ? length - i * BLOCK_BYTES : BLOCK_BYTES;
        load(words, from + i * BLOCK_BYTES, size);
        compress(value, words, counter, size,
                 flags | (i == 0 ? CHUNK_START : 0) | (is_last ? CHUNK_END | (is_root ? ROOT : 0) : 0));
    }
}

/* Joins `count` values, in place, to the first one. All threads of the block call it. */
__device__ __forceinline__ void join(u32 (*values)[8], u32 count, const u32 *key, u32 flags, bool is_root) {
    u32 words[16], value[8], place = threadIdx.x;
    while (count > 1) {
        u32 pairs = count / 2, left = pairs + (count & 1);
        if (place < pairs) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                words[i] = values[2 * place][i], words[8 + i] = values[2 * place + 1][i], value[i] = key[i];
            compress(value, words, 0, BLOCK_BYTES, flags | PARENT | (is_root && left == 1 ? ROOT : 0));
        } else if (place < left) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                value[i] = values[2 * place][i];
        }
        __syncthreads();
        if (place < left)
#pragma unroll
            for (int i = 0; i < 8; i++)
                values[place][i] = value[i];
        __syncthreads();
        count = left;
    }
}

__device__ __forceinline__ u32 groups_of(u64 bytes) {
    return bytes == 0 ? 1 : (u32)((bytes + GROUP_BYTES - 1) / GROUP_BYTES);
}

__device__ __forceinline__ u64 piece_size(u64 length, u32 piece_bytes, u64 piece) {
    u64 left = length - piece * piece_bytes;
    return left < piece_bytes ? left : piece_bytes;
}

/* A block of 256 threads for each group of a whole piece, times the pieces. */
extern "C" __global__ __launch_bounds__(GROUP_CHUNKS) void gpucr_digest_groups(
    const u8 *data, u64 length, u32 piece_bytes, const u32 *key, u32 flags, u32 *values) {
    __shared__ u32 chunks[GROUP_CHUNKS][8];
    u32 groups = groups_of(piece_bytes), group = blockIdx.x % groups;
    u64 piece = blockIdx.x / groups, size = piece_size(length, piece_bytes, piece), start = (u64)group * GROUP_BYTES;
    if (start >= size && group > 0)
        return;
    u64 here = size - start < GROUP_BYTES ? size - start : GROUP_BYTES, begin = (u64)threadIdx.x * CHUNK_BYTES;
    u32 count = here == 0 ? 1 : (u32)((here + CHUNK_BYTES - 1) / CHUNK_BYTES);
    bool is_whole = groups_of(size) == 1; /* the piece has no other group */
    if (threadIdx.x < count) {
        u32 value[8], left = here - begin < CHUNK_BYTES ? (u32)(here - begin) : CHUNK_BYTES;
#pragma unroll
        for (int i = 0; i < 8; i++)
            value[i] = key[i];
        hash_chunk(value, data + piece * piece_bytes + start + begin, left, (u64)group * GROUP_CHUNKS + threadIdx.x, flags,
                   is_whole && count == 1);
#pragma unroll
        for (int i = 0; i < 8; i++)
            chunks[threadIdx.x][i] = value[i];
    }
    __syncthreads();
    join(chunks, count, key, flags, is_whole);
    if (threadIdx.x < 8)
        values[(u64)blockIdx.x * 8 + threadIdx.x] = chunks[0][threadIdx.x];
}

/* A block of 256 threads for each piece. */
extern "C" __global__ __launch_bounds__(GROUP_CHUNKS) void gpucr_digest_pieces(
    const u8 *data, u64 length, u32 piece_bytes, const u32 *key, u32 flags, const u32 *values, u32 *digests) {
    __shared__ u32 groups[GROUP_CHUNKS][8];
    u32 of_all = groups_of(piece_bytes), count = groups_of(piece_size(length, piece_bytes, blockIdx.x));
    if (threadIdx.x < count)
#pragma unroll
        for (int i = 0; i < 8; i++)
            groups[threadIdx.x][i] = values[((u64)blockIdx.x * of_all + threadIdx.x) * 8 + i];
    __syncthreads();
    join(groups, count, key, flags, true);
    if (threadIdx.x < 8)
        digests[(u64)blockIdx.x * 8 + threadIdx.x] = groups[0][threadIdx.x];
}
