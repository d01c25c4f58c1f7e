/*
 * longjmp out of a driver call (from a callback, a signal handler) bypasses the call's stub. So the C library's jumps
 * are wrapped here, and the calls that they leave are taken out of the count.
 *
 * The position and mangling of the stack pointer in a jmp_buf are internal to the C library; sanitizers have relied on
 * them for years. On processors other than x86-64 an abandoned call is noticed at the thread's next one.
 */
#include "gate.h"

#include <setjmp.h>
#include <signal.h>

#define EXPORT __attribute__((visibility("default"), noreturn))

__attribute__((visibility("hidden"))) void (*real_longjmp)(struct __jmp_buf_tag *, int);

#if defined(__x86_64__)
static uintptr_t stack_pointer(const struct __jmp_buf_tag *target) {
    uintptr_t hidden = ((const uintptr_t *)target->__jmpbuf)[6], guard;
    __asm__("mov %%fs:0x30, %0" : "=r"(guard));
    return (hidden >> 17 | hidden << 47) ^ guard;
}
#else
static uintptr_t stack_pointer(const struct __jmp_buf_tag *target) {
    (void)target;
    return 0;
}
#endif

static void jump(struct __jmp_buf_tag target[1], int value) __attribute__((noreturn));
static void jump(struct __jmp_buf_tag target[1], int value) {
    stack_t stack;
    uintptr_t to = stack_pointer(target);
    bool on_signal_stack = sigaltstack(NULL, &stack) == 0 && (stack.ss_flags & SS_DISABLE) == 0 &&
                           to - (uintptr_t)stack.ss_sp < stack.ss_size;
    if (!on_signal_stack)
        gate_left_up_to(to);
    symbols_find_libc();
    real_longjmp(target, value);
    __builtin_unreachable();
}

EXPORT void longjmp(struct __jmp_buf_tag target[1], int value) {
    jump(target, value);
}

EXPORT void _longjmp(struct __jmp_buf_tag target[1], int value) {
    jump(target, value);
}

EXPORT void siglongjmp(sigjmp_buf target, int value) {
    jump(target, value);
}

EXPORT void __longjmp_chk(struct __jmp_buf_tag target[1], int value) {
    jump(target, value);
}
