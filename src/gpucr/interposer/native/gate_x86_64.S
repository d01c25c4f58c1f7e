/*
 * The stubs of the gate. Stub number N loads N and goes to gate_call, which makes a frame, asks gate_enter for the
 * function, calls it with the same arguments, and tells gate_leave, which may have it called once more. A real call and a real return: shadow stacks,
 * unwinders and profilers see an ordinary function.
 *
 * How many arguments lie on the stack is not known, so STACK_WORDS words are copied. The longest list of the driver API
 * (cuTensorMapEncodeIm2colWide) has 10 of them.
 */
#define STACK_WORDS 16

    .text

    .balign 16
    .cfi_startproc
    .cfi_personality 0x1b, gate_unwind
    .type gate_call, @function
gate_call:
    push    %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    mov     %rsp, %rbp
    .cfi_def_cfa_register %rbp
    /* -64(%rbp): struct frame, with the arguments from -48 on and the slot at -56; -72: al; -80: the result; -208: xmm0 to xmm7 */
    sub     $(208 + 8 * STACK_WORDS), %rsp
    mov     %rdi, -48(%rbp)
    mov     %rsi, -40(%rbp)
    mov     %rdx, -32(%rbp)
    mov     %rcx, -24(%rbp)
    mov     %r8,  -16(%rbp)
    mov     %r9,  -8(%rbp)
    imul    $SLOT_BYTES, %r11, %r11
    lea     gate_slots(%rip), %r10
    add     %r10, %r11
    mov     %r11, -56(%rbp)
    mov     %rax, -72(%rbp)
    movups  %xmm0, -96(%rbp)
    movups  %xmm1, -112(%rbp)
    movups  %xmm2, -128(%rbp)
    movups  %xmm3, -144(%rbp)
    movups  %xmm4, -160(%rbp)
    movups  %xmm5, -176(%rbp)
    movups  %xmm6, -192(%rbp)
    movups  %xmm7, -208(%rbp)
    mov     %r11, %rdi
    lea     -64(%rbp), %rsi
    call    gate_enter
1:  mov     %rax, %r11
    /* the words above the return address, to the bottom of this frame */
    .set    word, 0
    .rept   STACK_WORDS / 2
    movups  (16 + 16 * word)(%rbp), %xmm8
    movups  %xmm8, (16 * word)(%rsp)
    .set    word, word + 1
    .endr
    movups  -96(%rbp), %xmm0
    movups  -112(%rbp), %xmm1
    movups  -128(%rbp), %xmm2
    movups  -144(%rbp), %xmm3
    movups  -160(%rbp), %xmm4
    movups  -176(%rbp), %xmm5
    movups  -192(%rbp), %xmm6
    movups  -208(%rbp), %xmm7
    mov     -72(%rbp), %rax
    mov     -48(%rbp), %rdi
    mov     -40(%rbp), %rsi
    mov     -32(%rbp), %rdx
    mov     -24(%rbp), %rcx
    mov     -16(%rbp), %r8
    mov     -8(%rbp),  %r9
    call    *%r11
    mov     %rax, -80(%rbp)
    mov     -56(%rbp), %rdi
    lea     -64(%rbp), %rsi
    mov     %eax, %edx
    call    gate_leave
    test    %rax, %rax
    jnz     1b
    mov     -80(%rbp), %rax
    leave
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
    .size gate_call, . - gate_call

#define STUB \
    .balign 16 ;\
    endbr64 ;\
    mov     $number, %r11d ;\
    jmp     gate_call ;\
    .set    number, number + 1

#define NAME(called) \
    .globl  called ;\
    .type   called, @function ;\
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

/*
 * Look-ups that do not concern the interposer jump to the C library: RTLD_NEXT, RTLD_DEFAULT and the search path of
 * dlopen depend on the caller, which the C library finds by the return address.
 */
#define LOOK_UP(called, ours, theirs) \
    .balign 16 ;\
    .globl  called ;\
    .type   called, @function ;\
    .cfi_startproc ;\
called: ;\
    endbr64 ;\
    push    %rdi ;\
    .cfi_adjust_cfa_offset 8 ;\
    push    %rsi ;\
    .cfi_adjust_cfa_offset 8 ;\
    push    %rdx ;\
    .cfi_adjust_cfa_offset 8 ;\
    call    ours ;\
    pop     %rdx ;\
    .cfi_adjust_cfa_offset -8 ;\
    pop     %rsi ;\
    .cfi_adjust_cfa_offset -8 ;\
    pop     %rdi ;\
    .cfi_adjust_cfa_offset -8 ;\
    test    %rax, %rax ;\
    jz      1f ;\
    ret ;\
1:  jmp     *theirs(%rip) ;\
    .cfi_endproc ;\
    .size   called, . - called

    LOOK_UP(dlsym, symbols_dlsym, real_dlsym)
    LOOK_UP(dlvsym, symbols_dlvsym, real_dlvsym)
    LOOK_UP(dlopen, symbols_dlopen, real_dlopen)
    LOOK_UP(dlmopen, symbols_dlmopen, real_dlmopen)

    .section .note.GNU-stack, "", @progbits
