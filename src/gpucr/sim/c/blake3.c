/* BLAKE3 on the processor, for the simulated kernels that name pieces. Algorithm: the BLAKE3 paper (2020), section 2. */
#include "blake3.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8, CHUNK_BYTES = 1024, BLOCK_BYTES = 64 };

static const uint32_t START[4] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A};
static const uint8_t WORDS[7][16] = { /* of each round */
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

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
    uint32_t w[16], s[16];
    memcpy(w, block, sizeof w);
    memcpy(s, value, 8 * sizeof *s);
    memcpy(s + 8, START, sizeof START);
    s[12] = (uint32_t)counter, s[13] = (uint32_t)(counter >> 32), s[14] = length, s[15] = flags;
    for (int round = 0; round < 7; round++) {
        const uint8_t *at = WORDS[round];
        mix(s, 0, 4, 8, 12, w[at[0]], w[at[1]]), mix(s, 1, 5, 9, 13, w[at[2]], w[at[3]]);
        mix(s, 2, 6, 10, 14, w[at[4]], w[at[5]]), mix(s, 3, 7, 11, 15, w[at[6]], w[at[7]]);
        mix(s, 0, 5, 10, 15, w[at[8]], w[at[9]]), mix(s, 1, 6, 11, 12, w[at[10]], w[at[11]]);
        mix(s, 2, 7, 8, 13, w[at[12]], w[at[13]]), mix(s, 3, 4, 9, 14, w[at[14]], w[at[15]]);
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

/* Four chunks at once: a word of each in every vector. */
typedef uint32_t four __attribute__((vector_size(16)));

static four rotated_four(four word, int by) {
    return word >> by | word << (32 - by);
}

static void mix_four(four *s, int a, int b, int c, int d, four x, four y) {
    s[a] += s[b] + x;
    s[d] = rotated_four(s[d] ^ s[a], 16);
    s[c] += s[d];
    s[b] = rotated_four(s[b] ^ s[c], 12);
    s[a] += s[b] + y;
    s[d] = rotated_four(s[d] ^ s[a], 8);
    s[c] += s[d];
    s[b] = rotated_four(s[b] ^ s[c], 7);
}

static four all(uint32_t word) {
    return (four){word, word, word, word};
}

static void hash_four_chunks(uint32_t values[4][8], const uint32_t key[8], const uint8_t *data, uint64_t counter,
                             uint32_t flags) {
    four value[8], s[16], w[16];
    for (int i = 0; i < 8; i++)
        value[i] = all(key[i]);
    for (size_t done = 0; done < CHUNK_BYTES; done += BLOCK_BYTES) {
        uint32_t words[4][16];
        for (int chunk = 0; chunk < 4; chunk++)
            memcpy(words[chunk], data + chunk * CHUNK_BYTES + done, BLOCK_BYTES);
        for (int i = 0; i < 16; i++)
            w[i] = (four){words[0][i], words[1][i], words[2][i], words[3][i]};
        for (int i = 0; i < 8; i++)
            s[i] = value[i];
        for (int i = 0; i < 4; i++)
            s[8 + i] = all(START[i]);
        for (int chunk = 0; chunk < 4; chunk++) {
            s[12][chunk] = (uint32_t)(counter + (uint64_t)chunk);
            s[13][chunk] = (uint32_t)((counter + (uint64_t)chunk) >> 32);
        }
        s[14] = all(BLOCK_BYTES);
        s[15] = all(flags | (done == 0 ? CHUNK_START : 0) | (done + BLOCK_BYTES == CHUNK_BYTES ? CHUNK_END : 0));
#pragma GCC unroll 7
        for (int round = 0; round < 7; round++) {
            const uint8_t *at = WORDS[round];
            mix_four(s, 0, 4, 8, 12, w[at[0]], w[at[1]]), mix_four(s, 1, 5, 9, 13, w[at[2]], w[at[3]]);
            mix_four(s, 2, 6, 10, 14, w[at[4]], w[at[5]]), mix_four(s, 3, 7, 11, 15, w[at[6]], w[at[7]]);
            mix_four(s, 0, 5, 10, 15, w[at[8]], w[at[9]]), mix_four(s, 1, 6, 11, 12, w[at[10]], w[at[11]]);
            mix_four(s, 2, 7, 8, 13, w[at[12]], w[at[13]]), mix_four(s, 3, 4, 9, 14, w[at[14]], w[at[15]]);
        }
        for (int i = 0; i < 8; i++)
            value[i] = s[i] ^ s[i + 8];
    }
    for (int chunk = 0; chunk < 4; chunk++)
        for (int i = 0; i < 8; i++)
            values[chunk][i] = value[i][chunk];
}

/* The left part of a node is the largest power of two of chunks that leaves something for the right one. */
static void join(uint32_t value[8], const uint32_t key[8], uint32_t (*chunks)[8], size_t count, uint32_t flags) {
    if (count == 1) {
        memcpy(value, chunks[0], 8 * sizeof *value);
        return;
    }
    size_t left = 1;
    while (2 * left < count)
        left *= 2;
    uint32_t both[16];
    join(both, key, chunks, left, flags & ~(uint32_t)ROOT);
    join(both + 8, key, chunks + left, count - left, flags & ~(uint32_t)ROOT);
    memcpy(value, key, 8 * sizeof *value);
    compress(value, (const uint8_t *)both, 0, BLOCK_BYTES, flags | PARENT);
}

bool blake3(uint8_t digest[32], const uint32_t key[8], uint32_t flags, const uint8_t *data, size_t length) {
    size_t count = length == 0 ? 1 : (length + CHUNK_BYTES - 1) / CHUNK_BYTES, done = 0;
    uint32_t(*chunks)[8] = malloc((count + 1) * sizeof *chunks), *value = NULL;
    if (chunks == NULL)
        return false;
    value = chunks[count];
    for (; count > 1 && done + 4 <= length / CHUNK_BYTES; done += 4)
        hash_four_chunks(chunks + done, key, data + done * CHUNK_BYTES, done, flags);
    for (; done < count; done++) {
        size_t start = done * CHUNK_BYTES, size = length - start < CHUNK_BYTES ? length - start : CHUNK_BYTES;
        memcpy(chunks[done], key, sizeof *chunks);
        hash_chunk(chunks[done], data + start, size, done, flags | (count == 1 ? ROOT : 0));
    }
    join(value, key, chunks, count, flags | ROOT);
    memcpy(digest, value, 32);
    free(chunks);
    return true;
}
