/*
 * For programs that want a call before gpucr freezes them, and when they continue. Nothing has to be linked: without
 * the interposer both functions are NULL. (In a program compiled with -fno-pic, the default nowhere today, they are
 * always NULL; it finds them with dlsym(RTLD_DEFAULT, ...).)
 *
 *     #include "gpucr.h"
 *     if (gpucr_before_freeze != NULL)
 *         gpucr_before_freeze(flush, file);
 *
 * A hook runs in its own thread while the others keep running, may call CUDA, and returns 0, or another number on
 * failure, which gpucr reports. It delays the freeze by 10 s at most. A forked child must register its own hooks.
 */
#ifndef GPUCR_H
#define GPUCR_H

#ifdef __cplusplus
extern "C" {
#endif

typedef int gpucr_hook(void *data);

/* `hook` is called before the process is frozen (suspend, dump, freeze, move). Returns -1 if there are 16 already. */
int gpucr_before_freeze(gpucr_hook *hook, void *data) __attribute__((weak));

/* `hook` is called when the process continues: after a resume or restore, and after a failed freeze. */
int gpucr_after_restore(gpucr_hook *hook, void *data) __attribute__((weak));

#ifdef __cplusplus
}
#endif

#endif
