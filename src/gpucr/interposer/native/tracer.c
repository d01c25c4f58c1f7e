/*
 * Who may trace this process if Yama limits that to its ancestors (PR_SET_PTRACER). The agent allows its user's
 * processes while gpucr works on it, and restores the program's choice afterwards: message-passing libraries set it to
 * copy from each other, and the kernel cannot report the setting.
 */
#include "interposer.h"
#include "protocol.h"

#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Atomic unsigned long chosen; /* by the program */
static _Atomic bool opened;

static long set_tracer(unsigned long tracer) {
    return syscall(SYS_prctl, PR_SET_PTRACER, tracer, 0UL, 0UL, 0UL);
}

/* Replaces the C library's. */
__attribute__((visibility("default"))) int prctl(int option, ...) {
    unsigned long given[4];
    va_list list;
    va_start(list, option);
    for (int i = 0; i < 4; i++)
        given[i] = va_arg(list, unsigned long);
    va_end(list);
    long result = syscall(SYS_prctl, option, given[0], given[1], given[2], given[3]);
    if (option == PR_SET_PTRACER && result == 0) {
        atomic_store(&chosen, given[0]);
        if (atomic_load(&opened))
            set_tracer(PR_SET_PTRACER_ANY);
    }
    return (int)result;
}

uint32_t tracer_open(bool to_all) {
    atomic_store(&opened, to_all);
    if (set_tracer(to_all ? PR_SET_PTRACER_ANY : atomic_load(&chosen)) == 0)
        return DONE;
    if (!to_all) /* the chosen process has ended */
        return set_tracer(0) == 0 ? DONE : NOT_HERE;
    atomic_store(&opened, false);
    return NOT_HERE; /* this kernel has no Yama */
}

bool tracer_is_open(void) {
    return atomic_load(&opened);
}

/* The choice is only the parent's. */
void tracer_in_child(void) {
    atomic_store(&chosen, 0);
    atomic_store(&opened, false);
}
