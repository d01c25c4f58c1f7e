#include "socket.h"
#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SPARES 16

/* This user and root. */
static bool may_speak(int connection) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == 0 || peer.uid == geteuid());
}

struct owned socket_accept(const struct owned *listening) {
    int client = accept4(listening->number, NULL, NULL, SOCK_CLOEXEC);
    if (client < 0 || may_speak(client))
        return descriptor_keep(client);
    close(client);
    errno = EPERM;
    return NOTHING_OWNED;
}

void packet_add(struct packet *packet, int descriptor) {
    struct owned owned = descriptor_own(descriptor);
    if (owned.number < 0)
        close(descriptor); /* not even fstat(2) works on it */
    packet->descriptors[packet->descriptor_count++] = owned;
}

void packet_close(struct packet *packet) {
    while (packet->descriptor_count > 0)
        descriptor_close(&packet->descriptors[--packet->descriptor_count]);
}

/* The control buffer holds MOST_RECORDS; the kernel closes what does not fit. */
static void take_descriptors(struct msghdr *message, struct packet *packet) {
    for (struct cmsghdr *control = CMSG_FIRSTHDR(message); control != NULL; control = CMSG_NXTHDR(message, control)) {
        if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count && packet->descriptor_count < MOST_RECORDS; i++) {
            int number;
            memcpy(&number, CMSG_DATA(control) + i * sizeof number, sizeof number);
            packet_add(packet, number);
        }
    }
}

/* A packet of no bytes may have descriptors too; else it is the end. */
enum received socket_receive(const struct owned *connection, struct packet *packet) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(MOST_RECORDS * sizeof(int))];
    struct iovec parts[] = {{&packet->head, sizeof packet->head}, {packet->records, sizeof packet->records}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = control, .msg_controllen = sizeof control};
    packet->descriptor_count = 0;
    if (!descriptor_is_ours(connection))
        return GONE;
    ssize_t got = recvmsg(connection->number, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR ? NOTHING : GONE;
    take_descriptors(&message, packet);
    if (got == 0) {
        packet_close(packet);
        return GONE;
    }
    const struct message *head = &packet->head;
    bool well = (message.msg_flags & MSG_TRUNC) == 0 && (size_t)got >= sizeof *head && head->magic == PROTOCOL_MAGIC &&
                head->count <= MOST_RECORDS && (size_t)got == sizeof *head + head->count * sizeof(struct record);
    return well ? WELL : BAD;
}

/* Does not wait: nobody forks meanwhile, and who sends many requests without reading the answers is no client. */
bool socket_send(const struct owned *connection, const struct packet *packet, const void *payload, unsigned payload_bytes) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(MOST_RECORDS * sizeof(int))] = {0};
    struct iovec parts[] = {{(void *)&packet->head, sizeof packet->head}, {(void *)payload, payload_bytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (packet->descriptor_count > 0) {
        size_t bytes = packet->descriptor_count * sizeof(int);
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(bytes);
        struct cmsghdr *first = CMSG_FIRSTHDR(&message);
        first->cmsg_level = SOL_SOCKET;
        first->cmsg_type = SCM_RIGHTS;
        first->cmsg_len = CMSG_LEN(bytes);
        for (unsigned i = 0; i < packet->descriptor_count; i++) {
            if (!descriptor_is_ours(&packet->descriptors[i]))
                return false;
            memcpy(CMSG_DATA(first) + i * sizeof(int), &packet->descriptors[i].number, sizeof(int));
        }
    }
    return descriptor_is_ours(connection) && sendmsg(connection->number, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

/* Copies of the listening socket, which no file of the program's can be taken for. Low numbers: it may lower its limit. */
static int spares[SPARES];
static unsigned spare_count;

void spares_take(const struct owned *listening) {
    while (spare_count < SPARES && place_is_ours(listening->number) &&
           (spares[spare_count] = fcntl(listening->number, F_DUPFD_CLOEXEC, 3)) >= 0)
        spare_count++;
}

void spares_give(void) {
    while (spare_count > 0)
        if (place_is_ours(spares[--spare_count]))
            close(spares[spare_count]);
}
