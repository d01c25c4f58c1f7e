/*
 * A thread that sleeps in a system call inside the library, like several of the driver's. Because of such threads CRIU
 * must not let a checkpointed process run. Seen on driver 580 with JAX: CRIU takes a thread that it dumps or restores
 * out of its system call; the thread continues, reads what was a GPU mapping and is now an unreadable reservation, and
 * the process dies of SIGSEGV.
 */
#include "sim.h"

#include <errno.h>
#include <poll.h>

/*
 * Every signal is blocked here, and the kernel itself resumes a poll() that a SIGSTOP or a tracer interrupted. So EINTR
 * comes only from CRIU, which stores it as the call's result (seen with CRIU 4.2.1).
 */
static void *watch(void *unused) {
    const int patience_ms = 3600 * 1000; /* CRIU would restart a poll() without a timeout */
    (void)unused;
    while (true)
        if (poll(NULL, 0, patience_ms) < 0 && errno == EINTR)
            hardware_look();
    return NULL;
}

bool watcher_start(void) {
    return environment_number("GPUCR_SIM_WATCHER", 1) == 0 || thread_start(watch);
}
