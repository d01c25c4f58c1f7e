/* BLAKE3 on the processor, for the simulated kernels that name pieces. Algorithm: the BLAKE3 paper (2020), section 2. */
#include "blake3.h"

#include <string.h>

enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8, CHUNK_BYTES = 1024, BLOCK_BYTES = 64 };

static const uint32_t START[4] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A};
static const uint8_t NEXT[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8}; /* a round's words, of the last one's */

static uint32_t rotated(uint32_t word, int by) {
    return word >> by | word << (32 - by);
}

static void mix(uint32_t *s, int a, int b, int c, int d, uint32_t x, uint32_t y) {
    s[a] += s[b] + x;
    s[d] = rotated(s[d] ^ s[a], 16);
    s[c] += s[d];
    s[b] = rotated(s[b] ^ s[c], 12);
    s[a] += s[b] + y;
    s[d] = rotated(s[d] ^ s[a], 8);
    s[c] += s[d];
    s[b] = rotated(s[b] ^ s[c], 7);
}

static void compress(uint32_t value[8], const uint8_t block[BLOCK_BYTES], uint64_t counter, uint32_t length, uint32_t flags) {
    uint32_t w[16], s[16], before[16];
    memcpy(w, block, sizeof w);
    memcpy(s, value, 8 * sizeof *s);
    memcpy(s + 8, START, sizeof START);
    s[12] = (uint32_t)counter, s[13] = (uint32_t)(counter >> 32), s[14] = length, s[15] = flags;
    for (int round = 0; round < 7; round++) {
        mix(s, 0, 4, 8, 12, w[0], w[1]), mix(s, 1, 5, 9, 13, w[2], w[3]);
        mix(s, 2, 6, 10, 14, w[4], w[5]), mix(s, 3, 7, 11, 15, w[6], w[7]);
        mix(s, 0, 5, 10, 15, w[8], w[9]), mix(s, 1, 6, 11, 12, w[10], w[11]);
        mix(s, 2, 7, 8, 13, w[12], w[13]), mix(s, 3, 4, 9, 14, w[14], w[15]);
        memcpy(before, w, sizeof before);
        for (int i = 0; i < 16; i++)
            w[i] = before[NEXT[i]];
    }
    for (int i = 0; i < 8; i++)
        value[i] = s[i] ^ s[i + 8];
}

static void hash_chunk(uint32_t value[8], const uint8_t *data, size_t length, uint64_t counter, uint32_t flags) {
    for (size_t done = 0; done == 0 || done < length; done += BLOCK_BYTES) {
        size_t size = length - done < BLOCK_BYTES ? length - done : BLOCK_BYTES;
        uint8_t block[BLOCK_BYTES] = {0};
        memcpy(block, data + done, size);
        uint32_t last = done + size == length ? CHUNK_END | (flags & ROOT) : 0;
        compress(value, block, counter, (uint32_t)size, (flags & ~(uint32_t)ROOT) | (done == 0 ? CHUNK_START : 0) | last);
    }
}

/* The left part of a node is the largest power of two of chunks that leaves something for the right one. */
static void hash_tree(uint32_t value[8], const uint32_t key[8], const uint8_t *data, size_t length, uint64_t counter,
                      uint32_t flags) {
    memcpy(value, key, 8 * sizeof *value);
    if (length <= CHUNK_BYTES) {
        hash_chunk(value, data, length, counter, flags);
        return;
    }
    size_t left = CHUNK_BYTES;
    while (2 * left < length)
        left *= 2;
    uint32_t both[16];
    hash_tree(both, key, data, left, counter, flags & ~(uint32_t)ROOT);
    hash_tree(both + 8, key, data + left, length - left, counter + left / CHUNK_BYTES, flags & ~(uint32_t)ROOT);
    compress(value, (const uint8_t *)both, 0, BLOCK_BYTES, flags | PARENT);
}

void blake3(uint8_t digest[32], const uint32_t key[8], uint32_t flags, const uint8_t *data, size_t length) {
    uint32_t value[8];
    hash_tree(value, key, data, length, 0, flags | ROOT);
    memcpy(digest, value, sizeof value);
}
