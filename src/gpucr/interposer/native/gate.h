/*
 * The gate that every driver call passes. A call goes through a stub (gate_x86_64.S, gate_aarch64.S) with its own
 * frame, between gate_enter and gate_leave. While the gate is closed, calls wait in gate_enter.
 */
#ifndef GPUCR_INTERPOSER_GATE_H
#define GPUCR_INTERPOSER_GATE_H

#include "driver.h"

#include <stdbool.h>

/* A call, in the stub's frame on the stack; of two nested calls the inner one has the lower address. */
struct frame {
    const struct frame *covered; /* gate_enter's, gate_leave's: the record's entry that this one replaced */
    struct slot *slot;
    uint64_t arguments[6]; /* the registers that hold the first ones */
};

enum role { ORDINARY, BEGINS_CAPTURE, ENDS_CAPTURE, DESTROYS_STREAM, DESTROYS_CONTEXT, DESTROYS_PRIMARY, STARTS_CUDA, COPIES, COUNTED };

struct slot { /* one gated function; the stub knows its number */
    void *_Atomic target; /* what is called: the driver's function, or the one that replaces it. NULL: not looked up yet */
    const char *name;
    enum role role;
    int counter, delta; /* role COUNTED */
};

extern struct slot gate_slots[]; /* first the named stubs (names.inc), then the free ones */
void *gate_enter(struct slot *slot, struct frame *frame);
void *gate_leave(struct slot *slot, const struct frame *frame, result result); /* what is called again; NULL: it is over */
void gate_close(void);
void gate_open(void);
bool gate_is_closed(void);
bool gate_wait_empty(unsigned timeout_ms); /* nobody inside, no capture under way */
unsigned gate_inside(void);
int gate_who(const char **function); /* a thread that is inside, and where; 0: none is left */
void gate_pass_always(void); /* this thread: the agent */
void gate_left_up_to(uintptr_t stack_pointer); /* calls of this thread whose frames lie below it */
void gate_in_child(void);
void symbols_find_libc(void); /* symbols.c: dlsym, dlvsym and longjmp */

/* captures.c: the streams that are being captured */
void capture_began(stream stream);
void capture_ended(stream stream, result result);
void capture_forget(stream stream);
void captures_forget_all(void);
unsigned captures_open(void);
bool capture_is_mine(void); /* this thread began one of them */

#endif
