/* socket.c: the agent's socket, and messages on it. */
#ifndef GPUCR_INTERPOSER_SOCKET_H
#define GPUCR_INTERPOSER_SOCKET_H

#include "protocol.h"

#include <stdbool.h>

struct packet {
    struct message head;
    struct record records[MOST_RECORDS];
    int descriptors[MOST_RECORDS];
    unsigned descriptor_count;
};

int socket_listen(void); /* -1: there is no folder for it that only its owner can use */
bool socket_can_be_found(void); /* false after a restore, and where a clone has taken the name */
void socket_leave(void);        /* at the end of the process */
int socket_connect(int process); /* to the agent of another process of this user; -1: there is none */
int socket_accept(int listening); /* -1: nobody who may */
enum received { GONE, WELL, BAD, NOTHING } socket_receive(int client, struct packet *packet);
bool socket_send(int client, const struct packet *packet, const void *payload, unsigned payload_bytes);
void spares_take(void); /* numbers for the agent's descriptors, if the program opens all that it may */
void spares_give(void); /* they can be used */
void packet_close(struct packet *packet); /* its descriptors */

#endif
