/*
 * The agent's thread. While nobody asks anything it is in one poll(2) without a time limit, so that it does nothing
 * that the program has forbidden itself. If the program closes the agent's descriptors, that call still holds their
 * files: the next client wakes it, and it makes new ones.
 *
 * Whoever wants to change something is the client, one at a time. It can be replaced by another one while it holds
 * nothing and asks nothing. Requests that only look are answered for everybody.
 */
#include "agent.h"
#include "carry.h"
#include "interposer.h"
#include "place.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#define AGENT_NAME "gpucr-agent" /* presence.py looks for it */
#define MOST_CONNECTIONS 8
#define IDLE_NS 500000000u
#define NO_ROOM_MS 100

static _Atomic bool started;
static pthread_mutex_t descriptors_open = PTHREAD_MUTEX_INITIALIZER; /* nobody forks while it is held */
static struct owned listening = {.number = -1};
static _Atomic bool serves;
static struct connection {
    struct owned socket; /* nothing: free */
    uint64_t asked_ns;   /* when it connected, or asked the last time */
} connections[MOST_CONNECTIONS] = {[0 ... MOST_CONNECTIONS - 1] = {.socket = {.number = -1}}}, *client;
static bool client_holds;

static bool is_connected(const struct connection *connection) {
    return connection->socket.number >= 0;
}

/* A closed gate is a lease. If memory is away, it stays closed for the next client. */
static void hang_up(struct connection *connection) {
    descriptor_close(&connection->socket);
    if (connection != client)
        return;
    client = NULL;
    client_holds = false;
    room_lend(-1);
    agent_open_if_whole();
}

/* The client last: CRIU may come when it is gone, and cannot dump the others. Who has asked something asks again. */
static void hang_up_on_all(void) {
    for (struct connection *each = connections; each < connections + MOST_CONNECTIONS; each++)
        if (is_connected(each) && each != client)
            hang_up(each);
    hang_up(client);
}

static bool is_idle(const struct connection *connection) {
    return now_ns() - connection->asked_ns >= IDLE_NS;
}

static bool becomes_client(struct connection *connection) {
    if (client == connection)
        return true;
    if (client != NULL && (client_holds || !is_idle(client)))
        return false;
    if (client != NULL)
        hang_up(client);
    client = connection;
    return true;
}

/* --- the socket --------------------------------------------------------------------------------------------------- */

/* After a restore, where a name was taken or removed, and if the program has closed it. */
static void listen_again(bool is_lost) {
    spares_give();
    struct owned before = place_is_ours(listening.number) ? descriptor_own(listening.number) : NOTHING_OWNED;
    struct owned again = place_listen();
    if (again.number < 0 && !is_lost)
        return;
    descriptor_close(&before);
    listening = again;
}

static struct connection *free_connection(void) {
    struct connection *oldest = NULL;
    for (struct connection *each = connections; each < connections + MOST_CONNECTIONS; each++) {
        if (!is_connected(each))
            return each;
        if (each != client && (oldest == NULL || each->asked_ns < oldest->asked_ns))
            oldest = each;
    }
    hang_up(oldest);
    return oldest;
}

static void welcome(void) {
    spares_give();
    struct owned accepted = socket_accept(&listening);
    if (accepted.number >= 0)
        *free_connection() = (struct connection){accepted, now_ns()};
    else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
        poll(NULL, 0, NO_ROOM_MS); /* it stays in the queue, so that poll() would return at once */
}

/* --- requests ----------------------------------------------------------------------------------------------------- */

static uint32_t refusal(enum received received, struct connection *connection) {
    if (received == BAD)
        return MALFORMED;
    if (asked.head.version != PROTOCOL_VERSION)
        return WRONG_VERSION;
    return agent_only_looks() || becomes_client(connection) ? DONE : BUSY;
}

static uint32_t perform(void) {
    if (asked.head.operation == HELLO && !place_is_in_order())
        listen_again(false);
    client_holds = client_holds || agent_takes_hold();
    if (!agent_takes_long())
        return agent_perform();
    packet_close(&asked);
    pthread_mutex_unlock(&descriptors_open); /* a hook may take long, and may fork */
    uint32_t code = agent_perform();
    pthread_mutex_lock(&descriptors_open);
    return code;
}

/* False: it is gone. Nobody forks while a descriptor is open, so no child inherits one. */
static bool serve_one(struct connection *connection) {
    enum received received = socket_receive(&connection->socket, &asked);
    if (received != WELL && received != BAD)
        return received == NOTHING;
    connection->asked_ns = now_ns();
    answer.descriptor_count = 0;
    answer.head = (struct message){PROTOCOL_MAGIC, PROTOCOL_VERSION, asked.head.operation, 0, 0, 0, 0};
    answer.head.code = refusal(received, connection);
    if (answer.head.code == DONE)
        answer.head.code = perform();
    packet_close(&asked); /* when the client has the answer, nothing is held here */
    bool here = agent_reply(&connection->socket);
    packet_close(&answer);
    connection->asked_ns = now_ns();
    if (asked.head.operation == OPEN && answer.head.code == DONE) {
        agent_open_if_whole();
        client_holds = gate_is_closed();
    }
    return here;
}

static void serve_ready(const struct pollfd *ready) {
    for (int i = 0; i < MOST_CONNECTIONS; i++) {
        struct connection *each = &connections[i];
        if (ready[i].revents == 0 || !is_connected(each) || serve_one(each))
            continue;
        if (each == client)
            hang_up_on_all();
        else
            hang_up(each);
    }
}

static bool anybody_connected(void) {
    for (int i = 0; i < MOST_CONNECTIONS; i++)
        if (is_connected(&connections[i]))
            return true;
    return false;
}

/* A client that cannot find the socket makes it end (shutdown(2), through pidfd_getfd(2)): that is POLLHUP. */
static void serve_all(const struct pollfd *ready, const struct pollfd *socket) {
    pthread_mutex_lock(&descriptors_open);
    serve_ready(ready);
    if (!place_is_ours(listening.number) || (socket->revents & POLLHUP) != 0)
        listen_again(true);
    else if (socket->revents != 0)
        welcome();
    if (!anybody_connected())
        spares_take(&listening);
    pthread_mutex_unlock(&descriptors_open);
}

/* CRIU interrupts poll() when it dumps and when it restores: even then nothing else is called. */
static void *serve(void *is_ready) {
    gate_pass_always();
    pthread_setname_np(pthread_self(), AGENT_NAME);
    sem_post(is_ready);
    while (true) {
        struct pollfd watched[MOST_CONNECTIONS + 1];
        for (int i = 0; i < MOST_CONNECTIONS; i++)
            watched[i] = (struct pollfd){connections[i].socket.number, POLLIN, 0};
        watched[MOST_CONNECTIONS] = (struct pollfd){listening.number, POLLIN, 0};
        if (poll(watched, MOST_CONNECTIONS + 1, -1) > 0)
            serve_all(watched, watched + MOST_CONNECTIONS);
    }
    return NULL;
}

/* --- the thread, and what forks ------------------------------------------------------------------------------------- */

/* Returns when it has made its last call but one: the program may forbid itself all others at once. */
static bool start_thread(void) {
    static sem_t is_ready; /* the thread may still use it when this has returned */
    sigset_t all, before;
    pthread_t thread;
    sem_init(&is_ready, 0, 0);
    sigfillset(&all); /* the program's handlers run on the program's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    hooks_keep_mask(&before);
    int error = pthread_create(&thread, NULL, serve, &is_ready);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return false;
    pthread_detach(thread);
    while (sem_wait(&is_ready) < 0 && errno == EINTR)
        ;
    return true;
}

void agent_start(void) {
    if (atomic_exchange(&started, true))
        return;
    agent_see_devices();
    listening = place_listen();
    spares_take(&listening);
    if (listening.number >= 0 && start_thread()) {
        atomic_store(&serves, true);
        return;
    }
    spares_give();
    place_leave();
    descriptor_close(&listening);
}

bool agent_serves(void) {
    return atomic_load(&serves);
}

void agent_be_found(void) {
    pthread_mutex_lock(&descriptors_open);
    if (agent_serves() && !place_is_in_order() && place_is_ours(listening.number))
        shutdown(listening.number, SHUT_RDWR);
    pthread_mutex_unlock(&descriptors_open);
}

__attribute__((destructor)) static void leave(void) {
    if (agent_serves())
        place_leave();
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
    for (int i = 0; i < MOST_CONNECTIONS; i++)
        descriptor_close(&connections[i].socket);
    client = NULL;
    client_holds = false;
    kept_close();
    spares_give();
    if (place_is_ours(listening.number))
        close(listening.number);
    listening = NOTHING_OWNED;
    atomic_store(&serves, false);
    atomic_store(&started, false);
}
