/* The interposer's only thread: it serves requests on the socket, one client at a time. */
#include "carry.h"
#include "socket.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LONGEST_CLOSE_MS 60000
#define AGENT_NAME "gpucr-agent" /* client.py looks for it */
#define LOOK_EVERY_MS 500
#define REFUSAL_MS 100

static _Atomic bool started;
static pthread_mutex_t descriptors_open = PTHREAD_MUTEX_INITIALIZER; /* nobody forks while it is held */
static int listening = -1, client = -1;
static struct packet asked, answer; /* only the agent's; too large for a stack whose size others may have chosen */

static void count_ranges(struct status *status) {
    for (size_t i = 0; i < ranges.count; i++) {
        const struct range *range = sorted_at(&ranges, i);
        if (range->kind == SMALL) {
            status->small++;
            status->small_bytes += range->bytes;
            status->dma_buf += range->registered;
        } else if (range->kind == MANAGED) {
            status->managed++;
            status->managed_bytes += range->bytes;
        }
    }
}

static void count_blocks(struct status *status) {
    for (uint32_t i = 0; i < block_count(); i++) {
        const struct block *block = block_at(i);
        if (!block->live)
            continue;
        status->away += block->dropped;
        status->multicast += block->multicast;
        status->dma_buf += block->registered;
        bool foreign = !block->dropped && (block->imported || block->returned);
        status->foreign += foreign;
        status->captive += foreign && !carry_may_leave(block);
        if (block->multicast) {
            continue;
        } else if (block->imported) {
            status->imported++;
        } else if (carry_may_leave(block) || block->dropped) {
            status->blocks++;
            status->block_bytes += block->bytes;
        } else {
            status->stuck++;
            status->stuck_bytes += block->bytes;
        }
    }
}

static struct status status_now(void) {
    struct status status = {.gate_closed = gate_is_closed(), .inside = gate_inside(), .captures = captures_open()};
    uint64_t *counted = &status.arrays;
    count_ranges(&status);
    count_blocks(&status);
    for (int i = 0; i < COUNTERS; i++)
        counted[i] = (uint64_t)atomic_load(&counters[i]);
    status.traceable = tracer_is_open();
    status.hooks = hooks_registered();
    return status;
}

static uint32_t do_close(void) {
    uint64_t wait_ms = asked.head.a < LONGEST_CLOSE_MS ? asked.head.a : LONGEST_CLOSE_MS;
    gate_close();
    gate_wait_empty((unsigned)wait_ms);
    answer.head.a = gate_inside();
    answer.head.b = captures_open();
    return DONE;
}

static uint32_t do_hooks(void) {
    if (gate_is_closed())
        return GATE_IS_CLOSED; /* they may call CUDA */
    return hooks_call(asked.head.a, asked.head.b, &answer.head.a, &answer.head.b);
}

/* Kept data is needed for memory that is away, not filled yet, or not yet visible to peers. */
static bool is_whole(void) {
    return !carry_anything_away() && !kept_anything();
}

static void open_if_whole(void) {
    if (!is_whole())
        return;
    carry_forget_exports();
    gate_open();
}

static void add(const struct block *block) {
    answer.records[answer.head.count++] = carry_record(block);
}

/* Peers keep their memory even if it cannot leave: then through the kept descriptor. */
static bool goes_out(const struct block *block, bool to_peers) {
    if (!block->live || block->imported || block->dropped)
        return false;
    return to_peers ? block->given_out && (carry_may_leave(block) || shared_number(block) >= 0) : carry_may_leave(block);
}

/* As many as a message holds, or as there are descriptors for. */
static uint32_t do_export(void) {
    uint64_t index = asked.head.a;
    uint32_t code = DONE;
    for (; index < block_count() && answer.head.count < MOST_RECORDS; index++) {
        struct block *block = block_at((uint32_t)index);
        if (!goes_out(block, asked.head.b == 1))
            continue;
        code = carry_export(block, &answer.descriptors[answer.descriptor_count]);
        if (code != DONE)
            break;
        answer.descriptor_count++;
        add(block);
    }
    answer.head.a = index;
    answer.head.b = index >= block_count();
    return answer.head.count > 0 ? DONE : code; /* retried with the next batch */
}

static uint32_t do_list(void) {
    uint64_t index = asked.head.a;
    for (; index < block_count() && answer.head.count < MOST_RECORDS; index++) {
        const struct block *block = block_at((uint32_t)index);
        if (block->live)
            add(block);
    }
    answer.head.a = index;
    answer.head.b = index >= block_count();
    return DONE;
}

static uint32_t bring_back(const struct record *record, unsigned place) {
    struct block *block = block_number(record->block, (uint16_t)record->generation);
    if (block == NULL)
        return UNKNOWN_BLOCK;
    uint32_t code;
    if (asked.head.operation == IMPORT) {
        code = carry_import(block, asked.descriptors[place], asked.head.a == 1);
        close(asked.descriptors[place]); /* at once: the memory behind it may be needed for the next one */
        asked.descriptors[place] = -1;
    } else {
        code = carry_create(block, &answer.descriptors[answer.descriptor_count]);
        if (code == DONE)
            answer.descriptor_count++;
    }
    if (code == DONE)
        add(block);
    return code;
}

/* In the order of the records, up to the first failure: the answer lists those that are back. */
static uint32_t do_bring_back(void) {
    uint32_t code = DONE;
    if (asked.head.operation == IMPORT && asked.descriptor_count != asked.head.count)
        return NO_DESCRIPTORS;
    shared_begin();
    for (unsigned i = 0; i < asked.head.count && code == DONE; i++)
        code = bring_back(&asked.records[i], i);
    shared_end();
    if (asked.head.operation == CREATE && answer.head.count > 0)
        return DONE; /* the client repeats the rest: descriptors may have run out */
    return code;
}

static uint32_t do_fill(void) {
    uint64_t offset = asked.head.a;
    uint32_t code = DONE;
    for (unsigned i = 0; i < asked.head.count && code == DONE; i++) {
        struct block *block = block_number(asked.records[i].block, (uint16_t)asked.records[i].generation);
        code = block != NULL ? carry_fill(block, kept_number(KEPT_MEMORY), offset) : UNKNOWN_BLOCK;
        offset += block != NULL ? block->bytes : 0;
    }
    return code;
}

static uint32_t on_memory(void) {
    if (!gate_is_closed())
        return GATE_NOT_CLOSED;
    if (!gate_wait_empty(0))
        return SOMEBODY_INSIDE;
    if (asked.head.operation == EXPORT)
        return do_export();
    if (asked.head.operation == FILL)
        return do_fill();
    if (asked.head.operation != DROP)
        return do_bring_back();
    return asked.head.a <= DROP_IMPORTED ? carry_drop((enum drops)asked.head.a) : MALFORMED;
}

static uint32_t answer_hello(void) {
    answer.head.a = (uint64_t)getpid();
    answer.head.b = (uint64_t)syscall(SYS_gettid);
    return DONE;
}

static uint32_t on_memory_locked(void) {
    table_lock();
    uint32_t code = asked.head.operation == LIST ? do_list() : on_memory();
    table_unlock();
    return code;
}

static uint32_t perform(void) {
    switch (asked.head.operation) {
    case HELLO:
        return answer_hello();
    case STATUS:
        return DONE;
    case OPEN: /* opened after the answer: the program may exit at once, and the agent with it */
        return is_whole() ? DONE : MEMORY_IS_AWAY;
    case EXPORT:
    case DROP:
    case IMPORT:
    case CREATE:
    case FILL:
    case LIST:
        return on_memory_locked();
    case KEEP:
        return kept_take(&asked);
    case FETCH:
        return kept_give(asked.head.a, &answer);
    case TRACE:
        return tracer_open(asked.head.a == 1);
    default:
        return MALFORMED;
    }
}

static struct inside who_is_inside(void) {
    struct inside who = {0};
    const char *function = "";
    who.thread = gate_who(&function);
    strncpy(who.function, function, sizeof who.function - 1);
    return who;
}

static bool reply_status(int to) {
    table_lock();
    struct status status = status_now();
    table_unlock();
    return socket_send(to, &answer, &status, sizeof status);
}

static bool reply(void) {
    struct inside inside;
    const void *payload = answer.records;
    unsigned bytes = answer.head.count * (unsigned)sizeof(struct record);
    if (asked.head.operation == STATUS && answer.head.code == DONE) {
        return reply_status(client);
    } else if (asked.head.operation == CLOSE && answer.head.code == DONE && answer.head.a != 0) {
        inside = who_is_inside();
        payload = &inside;
        bytes = sizeof inside;
    }
    return socket_send(client, &answer, payload, bytes);
}

static void close_asked(void) {
    for (unsigned i = 0; i < asked.descriptor_count; i++)
        if (asked.descriptors[i] >= 0)
            close(asked.descriptors[i]);
    asked.descriptor_count = 0;
}

static uint32_t refusal(enum received received) {
    if (received == BAD)
        return MALFORMED;
    return asked.head.version == PROTOCOL_VERSION ? DONE : WRONG_VERSION;
}

/* False: the client is gone. Nobody forks while a descriptor is open, so no child inherits one. */
static bool serve_one(void) {
    pthread_mutex_lock(&descriptors_open);
    enum received received = socket_receive(client, &asked);
    bool here = received != GONE;
    if (received == WELL || received == BAD) {
        memset(&answer.head, 0, sizeof answer.head);
        answer.descriptor_count = 0;
        answer.head = (struct message){PROTOCOL_MAGIC, PROTOCOL_VERSION, asked.head.operation, 0, 0, 0, 0};
        answer.head.code = refusal(received);
        if (answer.head.code == DONE && (asked.head.operation == CLOSE || asked.head.operation == HOOKS)) {
            close_asked();
            pthread_mutex_unlock(&descriptors_open); /* a hook may take long, and may fork */
            answer.head.code = asked.head.operation == CLOSE ? do_close() : do_hooks();
            pthread_mutex_lock(&descriptors_open);
        } else if (answer.head.code == DONE) {
            answer.head.code = perform();
        }
        close_asked(); /* when the client has the answer, nothing is held here */
        here = reply();
        packet_close(&answer);
        if (asked.head.operation == OPEN && answer.head.code == DONE)
            open_if_whole();
    }
    close_asked();
    pthread_mutex_unlock(&descriptors_open);
    return here;
}

/* A closed gate is a lease. If memory is away, it stays closed for the next client. */
static void client_gone(void) {
    close(client);
    client = -1;
    open_if_whole();
    spares_take();
}

/* Read the request first: closing a socket with unread data discards the answer. */
static void refuse_second(int second) {
    struct packet *busy = &answer;
    struct pollfd asking = {second, POLLIN, 0};
    if (poll(&asking, 1, REFUSAL_MS) > 0 && socket_receive(second, &asked) != GONE)
        packet_close(&asked);
    busy->head = (struct message){PROTOCOL_MAGIC, PROTOCOL_VERSION, HELLO, BUSY, 0, 0, 0};
    busy->descriptor_count = 0;
    socket_send(second, busy, NULL, 0);
    close(second);
}

static uint32_t do_share(void) {
    address start = asked.head.a;
    const struct range *range = ipc_range(start, asked.head.b);
    if (range == NULL)
        return UNKNOWN_BLOCK;
    address end = range->start + range->reserved;
    while (start < end && answer.head.count < MOST_RECORDS) {
        const struct mapping *mapping = mapping_of(start);
        struct block *block = mapping != NULL && mapping->start == start ? block_at(mapping->block) : NULL;
        if (block == NULL || !block->given_out)
            return UNKNOWN_BLOCK;
        if (block->dropped)
            return MEMORY_IS_AWAY;
        int copy = fcntl(shared_number(block), F_DUPFD_CLOEXEC, 3);
        if (copy < 0)
            return answer.head.count > 0 ? DONE : NO_DESCRIPTORS; /* the client repeats the rest */
        answer.descriptors[answer.descriptor_count++] = copy;
        add(block);
        start += mapping->bytes;
    }
    answer.head.a = start;
    answer.head.b = start >= end;
    return DONE;
}

/* A peer that opens this process's memory by legacy IPC, or somebody who only wants to know what there is. */
static bool only_asks(int connection) {
    struct message head;
    struct pollfd asking = {connection, POLLIN, 0};
    return poll(&asking, 1, REFUSAL_MS) > 0 &&
           recv(connection, &head, sizeof head, MSG_PEEK | MSG_DONTWAIT) == sizeof head && head.magic == PROTOCOL_MAGIC &&
           (head.operation == SHARE || head.operation == STATUS || head.operation == LIST);
}

/* At once, even while there is a client. */
static void answer_only(int other) {
    pthread_mutex_lock(&descriptors_open);
    enum received received = socket_receive(other, &asked);
    answer.head = (struct message){PROTOCOL_MAGIC, PROTOCOL_VERSION, asked.head.operation, refusal(received), 0, 0, 0};
    answer.descriptor_count = 0;
    if (answer.head.code == DONE && asked.head.operation != STATUS) {
        table_lock();
        answer.head.code = asked.head.operation == SHARE ? do_share() : do_list();
        table_unlock();
    }
    close_asked();
    if (answer.head.code == DONE && asked.head.operation == STATUS)
        reply_status(other);
    else
        socket_send(other, &answer, answer.records, answer.head.count * (unsigned)sizeof(struct record));
    packet_close(&answer);
    pthread_mutex_unlock(&descriptors_open);
    close(other);
}

static void welcome(void) {
    spares_give();
    int other = socket_accept(listening);
    if (other >= 0 && only_asks(other)) {
        answer_only(other);
    } else if (other >= 0 && client >= 0) {
        pthread_mutex_lock(&descriptors_open);
        refuse_second(other);
        pthread_mutex_unlock(&descriptors_open);
    } else if (other >= 0) {
        client = other;
    }
    if (client < 0)
        spares_take();
}

/* CRIU restores the socket under its old name; a clone restored beside this process takes the name over. */
static void listen_again(void) {
    pthread_mutex_lock(&descriptors_open);
    spares_give();
    int again = socket_listen();
    if (again >= 0) {
        close(listening);
        listening = again;
    }
    if (client < 0)
        spares_take();
    pthread_mutex_unlock(&descriptors_open);
}

static void *serve(void *unused) {
    (void)unused;
    gate_pass_always();
    pthread_setname_np(pthread_self(), AGENT_NAME); /* if there is no /proc */
    while (true) {
        struct pollfd watched[] = {{listening, POLLIN, 0}, {client, POLLIN, 0}};
        if (poll(watched, 2, LOOK_EVERY_MS) <= 0) {
            if (!socket_can_be_found())
                listen_again();
            continue;
        }
        if (client >= 0 && watched[1].revents != 0 && !serve_one())
            client_gone();
        if (watched[0].revents != 0)
            welcome();
    }
    return NULL;
}

static bool start_thread(void) {
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all); /* the program's handlers run on the program's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    hooks_keep_mask(&before);
    int error = pthread_create(&thread, NULL, serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0) {
        pthread_setname_np(thread, AGENT_NAME); /* it is found by this name, even if it has not run yet */
        pthread_detach(thread);
    }
    return error == 0;
}

void agent_start(void) {
    if (atomic_exchange(&started, true))
        return;
    listening = socket_listen();
    spares_take();
    if (listening >= 0 && !start_thread()) {
        close(listening);
        listening = -1;
    }
}

__attribute__((destructor)) static void leave(void) {
    if (listening >= 0)
        socket_leave();
}

void agent_before_fork(void) {
    pthread_mutex_lock(&descriptors_open);
    table_lock();
}

void agent_in_parent(void) {
    table_unlock();
    pthread_mutex_unlock(&descriptors_open);
}

void agent_in_child(void) {
    pthread_mutex_init(&descriptors_open, NULL);
    if (listening >= 0)
        close(listening);
    if (client >= 0)
        close(client);
    kept_close();
    spares_give();
    listening = client = -1;
    atomic_store(&started, false);
}
