/* The stubs of the gate on aarch64; gate_x86_64.S explains what they do and why. */
#define STACK_WORDS 16

    .text

    .balign 16
    .cfi_startproc
    .cfi_personality 0x1b, gate_unwind
    .type gate_call, %function
gate_call:
    stp     x29, x30, [sp, -16]!
    .cfi_def_cfa_offset 16
    .cfi_offset x29, -16
    .cfi_offset x30, -8
    mov     x29, sp
    .cfi_def_cfa_register x29
    /* x29 - 64: struct frame, with the arguments from - 48 on and the slot at - 56; - 80: x6, x7; - 88: the result; - 96: x8; - 224: q0 to q7 */
    sub     sp, sp, 224 + 8 * STACK_WORDS
    stp     x0, x1, [x29, -48]
    stp     x2, x3, [x29, -32]
    stp     x4, x5, [x29, -16]
    stp     x6, x7, [x29, -80]
    mov     w16, SLOT_BYTES
    adrp    x9, gate_slots
    add     x9, x9, :lo12:gate_slots
    madd    x17, x17, x16, x9
    str     x8, [x29, -96]
    str     x17, [x29, -56]
    stp     q0, q1, [x29, -128]
    stp     q2, q3, [x29, -160]
    stp     q4, q5, [x29, -192]
    stp     q6, q7, [x29, -224]
    mov     x0, x17
    sub     x1, x29, 64
    bl      gate_enter
1:  mov     x16, x0
    /* the words above this frame, to the bottom of it */
    .set    word, 0
    .rept   STACK_WORDS / 2
    ldp     x9, x10, [x29, 16 + 16 * word]
    stp     x9, x10, [sp, 16 * word]
    .set    word, word + 1
    .endr
    ldp     q0, q1, [x29, -128]
    ldp     q2, q3, [x29, -160]
    ldp     q4, q5, [x29, -192]
    ldp     q6, q7, [x29, -224]
    ldr     x8, [x29, -96]
    ldp     x0, x1, [x29, -48]
    ldp     x2, x3, [x29, -32]
    ldp     x4, x5, [x29, -16]
    ldp     x6, x7, [x29, -80]
    blr     x16
    str     x0, [x29, -88]
    mov     w2, w0
    ldr     x0, [x29, -56]
    sub     x1, x29, 64
    bl      gate_leave
    cbnz    x0, 1b
    ldr     x0, [x29, -88]
    mov     sp, x29
    .cfi_def_cfa_register sp
    ldp     x29, x30, [sp], 16
    .cfi_restore x29
    .cfi_restore x30
    .cfi_def_cfa_offset 0
    ret
    .cfi_endproc
    .size gate_call, . - gate_call

/* `hint 34` is bti c, which older assemblers do not know by name. */
#define STUB \
    .balign 16 ;\
    hint    34 ;\
    mov     w17, number ;\
    b       gate_call ;\
    .set    number, number + 1

#define NAME(called) \
    .globl  called ;\
    .type   called, %function ;\
    .balign 16 ;\
called: ;\
    STUB

    .balign 16
    .globl  gate_named_stubs
    .hidden gate_named_stubs
    .cfi_startproc
gate_named_stubs:
    .set    number, 0
#include "names.inc"
    .balign 16
    .globl  gate_free_stubs
    .hidden gate_free_stubs
gate_free_stubs:
    .rept   FREE_STUBS
    STUB
    .endr
    .cfi_endproc

#define LOOK_UP(called, ours, theirs) \
    .balign 16 ;\
    .globl  called ;\
    .type   called, %function ;\
    .cfi_startproc ;\
called: ;\
    hint    34 ;\
    stp     x29, x30, [sp, -48]! ;\
    .cfi_def_cfa_offset 48 ;\
    .cfi_offset x29, -48 ;\
    .cfi_offset x30, -40 ;\
    stp     x0, x1, [sp, 16] ;\
    str     x2, [sp, 32] ;\
    mov     x29, sp ;\
    bl      ours ;\
    mov     x16, x0 ;\
    ldp     x0, x1, [sp, 16] ;\
    ldr     x2, [sp, 32] ;\
    ldp     x29, x30, [sp], 48 ;\
    .cfi_restore x29 ;\
    .cfi_restore x30 ;\
    .cfi_def_cfa_offset 0 ;\
    cbz     x16, 1f ;\
    mov     x0, x16 ;\
    ret ;\
1:  adrp    x16, theirs ;\
    ldr     x16, [x16, :lo12:theirs] ;\
    br      x16 ;\
    .cfi_endproc ;\
    .size   called, . - called

    LOOK_UP(dlsym, symbols_dlsym, real_dlsym)
    LOOK_UP(dlvsym, symbols_dlvsym, real_dlvsym)
    LOOK_UP(dlopen, symbols_dlopen, real_dlopen)
    LOOK_UP(dlmopen, symbols_dlmopen, real_dlmopen)

    .section .note.GNU-stack, "", %progbits
