/*
 * place.c: where agents listen. A socket has two names in a folder that only its user can use:
 *
 *     PID.NAMESPACE       by which it is found. The process's own pid; the pid namespace, because others have the same
 *                         pids, and a job and its clone may share the folder
 *     PID.NAMESPACE.XXXX  to which it is bound. CRIU restores this one: a restored process can be found by it, also in
 *                         another pid namespace. A clone that takes it leaves the original its other name
 */
#ifndef GPUCR_INTERPOSER_PLACE_H
#define GPUCR_INTERPOSER_PLACE_H

#include "descriptors.h"

struct owned place_listen(void); /* makes a new socket there, and gives up the old names. Nothing: there is no place */
bool place_is_ours(int number);  /* a descriptor of this socket: it is known by its name, which a restore keeps */
bool place_is_in_order(void);    /* false: after a restore, or when somebody has removed or taken a name */
void place_leave(void);          /* at the end of the process */
struct owned place_connect(int process); /* to the agent of another process of this user. Nothing: there is none */

#endif
