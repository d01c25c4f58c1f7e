/* socket.c: messages on the agent's socket, with descriptors. */
#ifndef GPUCR_INTERPOSER_SOCKET_H
#define GPUCR_INTERPOSER_SOCKET_H

#include "descriptors.h"
#include "protocol.h"

struct packet {
    struct message head;
    struct record records[MOST_RECORDS];
    struct owned descriptors[MOST_RECORDS];
    unsigned descriptor_count;
};

struct owned socket_accept(const struct owned *listening); /* nothing: nobody who may. errno: why */
enum received { GONE, WELL, BAD, NOTHING } socket_receive(const struct owned *connection, struct packet *packet);
/* False: it did not go out, or a descriptor is the program's by now. */
bool socket_send(const struct owned *connection, const struct packet *packet, const void *payload, unsigned payload_bytes);
void packet_add(struct packet *packet, int descriptor);
void packet_close(struct packet *packet); /* its descriptors */
void spares_take(const struct owned *listening); /* numbers for the agent, if the program opens all that it may */
void spares_give(void);                          /* they can be used */

#endif
