/* agent.c: what the agent does when it is asked. serve.c: its thread, and who is served. */
#ifndef GPUCR_INTERPOSER_AGENT_H
#define GPUCR_INTERPOSER_AGENT_H

#include "socket.h"

extern struct packet asked, answer; /* the agent's alone; too large for a stack whose size others may have chosen */

bool agent_takes_long(void);   /* what is asked: it waits for the program, which may fork meanwhile */
bool agent_only_looks(void);   /* what is asked changes nothing: answered for everybody, at any time */
bool agent_takes_hold(void);   /* who asks this holds the process until it opens the gate or hangs up */
uint32_t agent_perform(void);  /* does it. An enum code */
bool agent_reply(const struct owned *connection);
void agent_open_if_whole(void); /* the gate */
void agent_see_devices(void);

#endif
