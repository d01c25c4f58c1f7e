/* carry.c: blocks leave the process and come back. Functions that take a block need the table locked, the gate closed
   and empty. */
#ifndef GPUCR_INTERPOSER_CARRY_H
#define GPUCR_INTERPOSER_CARRY_H

#include "interposer.h"
#include "protocol.h"

/* An enum code, as all of these. `leaves`: the block goes with the next carry_drop; else the gate may be open. */
uint32_t carry_export(struct block *block, int *descriptor, bool leaves);
uint32_t carry_drop(enum drops what); /* what was exported to this client, what other processes own, or both */
bool carry_may_leave(const struct block *block);
uint32_t carry_import(struct block *block, int descriptor, bool renew);
uint32_t carry_create(struct block *block, int *descriptor);
uint32_t carry_fill(struct block *block, int file, uint64_t offset); /* its bytes, from there */
void carry_forget_exports(void);       /* the client is gone */
bool carry_anything_away(void);
struct record carry_record(const struct block *block);

/* kept.c */
struct packet;
bool kept_anything(void);
int kept_number(enum kept what); /* -1: nothing is */
void kept_close(void);
uint32_t kept_take(struct packet *asked);
uint32_t kept_give(uint64_t what, struct packet *answer);

#endif
