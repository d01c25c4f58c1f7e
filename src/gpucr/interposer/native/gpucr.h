/*
 * For programs that want to be asked before gpucr freezes them, and told when they go on. Nothing has to be linked: without
 * the interposer both functions are NULL. (So they always are in a program that was compiled with -fno-pic, the default nowhere
 * today; it finds them with dlsym(RTLD_DEFAULT, ...).)
 *
 *     #include "gpucr.h"
 *     if (gpucr_before_freeze != NULL)
 *         gpucr_before_freeze(flush, file);
 *
 * A hook runs in a thread of its own while the others go on, may call CUDA, and returns 0, or another number if it has
 * failed, which gpucr tells its user. It holds up the freeze for 10 s at most. A forked child registers its own.
 *  */
#ifndef GPUCR_H
#define GPUCR_H

#ifdef __cplusplus
extern "C" {
#endif

typedef int gpucr_hook(void *data);

/* `hook` is called before the process is frozen (suspend, dump, freeze, move). Returns -1 if there are 16 already. */
int gpucr_before_freeze(gpucr_hook *hook, void *data) __attribute__((weak));

/* `hook` is called when the process goes on: after a resume or restore, and after a freeze of which nothing came. */
int gpucr_after_restore(gpucr_hook *hook, void *data) __attribute__((weak));

#ifdef __cplusplus
}
#endif

#endif
