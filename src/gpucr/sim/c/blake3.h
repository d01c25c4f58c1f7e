#ifndef GPUCR_SIM_BLAKE3_H
#define GPUCR_SIM_BLAKE3_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* `key` and `flags` as the GPU's kernel takes them: its own words, or BLAKE3's and 0. Little-endian machines only.
   False: no memory. */
bool blake3(uint8_t digest[32], const uint32_t key[8], uint32_t flags, const uint8_t *data, size_t length);

#endif
