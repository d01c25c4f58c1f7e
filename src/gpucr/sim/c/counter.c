/*
 * counter: keeps a number in GPU memory and answers each UDP packet on 127.0.0.1 with the incremented number. Special
 * packets: "verify" (are the random bytes intact?), "busy MS" (occupy the GPU), "pid". With --by-file it opens no
 * socket: PORT.ask and PORT.answer in the working folder replace the packets.
 */
#include "counter.h"
#include "kernel.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define LOWEST_PORT 10000

static pid_t children[MAX_CHILDREN];
static int child_count;

/* Exit at once, from any point: the main thread may be in a driver call that waits for an unlock. */
static void on_terminate(int signal_number) {
    (void)signal_number;
    for (int i = 0; i < child_count; i++)
        kill(children[i], SIGTERM);
    _exit(EXIT_SUCCESS);
}

static void fail(const char *what) {
    fprintf(stderr, "counter: %s: %s\n", what, strerror(errno));
    exit(EXIT_FAILURE);
}

static int bind_to(int fd, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return bind(fd, (struct sockaddr *)&address, sizeof address);
}

/* The lowest ephemeral port. */
static int first_of_the_kernels_ports(void) {
    int first = 0;
    FILE *file = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");
    if (file != NULL && fscanf(file, "%d", &first) != 1)
        first = 0;
    if (file != NULL)
        fclose(file);
    return first;
}

/*
 * A free port from 10000 up to the ephemeral range; starts at a value derived from the pid, for counters that start at
 * once. An ephemeral port may be taken by somebody else between a dump and the restore.
 */
static int bind_below_the_kernels_ports(int fd) {
    int count = first_of_the_kernels_ports() - LOWEST_PORT;
    for (int i = 0; i < count; i++) {
        int port = LOWEST_PORT + (getpid() * 7 + i) % count;
        if (bind_to(fd, port) == 0)
            return port;
        if (errno != EADDRINUSE)
            fail("bind");
    }
    return 0;
}

/* The socket; *port is filled in where it was 0. */
static int open_socket(int *port) {
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        fail("socket");
    if (*port == 0 && (*port = bind_below_the_kernels_ports(fd)) != 0)
        return fd;
    if (bind_to(fd, *port) < 0)
        fail("bind");
    if (getsockname(fd, (struct sockaddr *)&address, &length) < 0)
        fail("getsockname");
    *port = ntohs(address.sin_port);
    return fd;
}

static void answer(const char *question, char reply[TEXT_BYTES]) {
    uint64_t duration_ms;
    if (strcmp(question, "verify") == 0) {
        strcpy(reply, state_verify() ? "ok" : "corrupt");
    } else if (strcmp(question, "pid") == 0) {
        snprintf(reply, TEXT_BYTES, "%d", getpid());
    } else if (sscanf(question, "busy %" SCNu64, &duration_ms) == 1) {
        state_busy(duration_ms);
        strcpy(reply, "busy");
    } else {
        snprintf(reply, TEXT_BYTES, "%" PRIu64, state_increment());
    }
}

static void answer_one(int socket_fd) {
    char question[TEXT_BYTES], reply[TEXT_BYTES];
    struct sockaddr_in peer;
    socklen_t length = sizeof peer;
    ssize_t got = recvfrom(socket_fd, question, sizeof question - 1, 0, (struct sockaddr *)&peer, &length);
    if (got < 0)
        return;
    question[got] = '\0';
    question[strcspn(question, "\r\n")] = '\0';
    answer(question, reply);
    sendto(socket_fd, reply, strlen(reply), 0, (struct sockaddr *)&peer, length);
}

/* Both files are renamed into place, so neither is ever seen half-written. */
static void answer_file(int port) {
    char ask[32], unfinished[32], answered[32], question[TEXT_BYTES], reply[TEXT_BYTES];
    snprintf(ask, sizeof ask, "%d.ask", port);
    int fd = open(ask, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t got = read(fd, question, sizeof question - 1);
    close(fd);
    if (got < 0 || unlink(ask) < 0)
        fail(ask);
    question[got] = '\0';
    answer(question, reply);
    snprintf(unfinished, sizeof unfinished, "%d.unfinished", port);
    snprintf(answered, sizeof answered, "%d.answer", port);
    fd = open(unfinished, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, reply, strlen(reply)) < 0 || close(fd) < 0 || rename(unfinished, answered) < 0)
        fail(answered);
}

static void serve(int socket_fd, const struct options *options) {
    const int look_for_file_every_ms = options->by_file ? 2 : 20;
    bool waits_for_file = options->cuda_after != NULL && !options->no_cuda;
    while (true) {
        struct pollfd readable = {.fd = socket_fd, .events = POLLIN}; /* without a socket: -1, which poll ignores */
        if (poll(&readable, 1, waits_for_file || options->by_file ? look_for_file_every_ms : -1) > 0)
            answer_one(socket_fd);
        if (options->by_file)
            answer_file(options->port);
        if (waits_for_file && access(options->cuda_after, F_OK) == 0) {
            state_to_gpu();
            waits_for_file = false;
        }
    }
}

/*
 * With children: a deleted file that all have mapped, as ranks with NCCL's shared memory do. gpucr relies on it:
 * processes on one GPU without such a file may share device memory, which does not come back.
 */
static void map_as_ranks(void) {
    const size_t size_bytes = 4096;
    char path[64];
    snprintf(path, sizeof path, "/dev/shm/nccl-counter-%d", getpid());
    unlink(path); /* left by a killed process with the same pid */
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0)
        unlink(path);
    else /* a container without /dev/shm: the mapping contains the name too */
        fd = new_memory_file(path);
    if (fd < 0 || ftruncate(fd, (off_t)size_bytes) < 0 ||
        mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED)
        fail(path);
    close(fd);
}

/* Forks the children before CUDA starts; in a child returns its index + 1, and its end of the pipe in *ready. */
static int fork_children(int count, pid_t parent, int pipes[MAX_CHILDREN], int *ready) {
    for (int i = 0; i < count; i++) {
        int ends[2];
        if (pipe(ends) < 0)
            fail("pipe");
        pid_t pid = fork();
        if (pid < 0)
            fail("fork");
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* a killed parent leaves no counters behind */
            if (getppid() != parent)
                _exit(EXIT_FAILURE);
            child_count = 0;
            close(ends[0]);
            for (int other = 0; other < i; other++)
                close(pipes[other]);
            *ready = ends[1];
            return i + 1;
        }
        close(ends[1]);
        pipes[i] = ends[0];
        children[child_count++] = pid;
    }
    return 0;
}

static void print_children(const int pipes[MAX_CHILDREN]) {
    for (int i = 0; i < child_count; i++) {
        char port[16] = "";
        if (read(pipes[i], port, sizeof port - 1) <= 0) {
            fprintf(stderr, "counter: a child ended before it was ready\n");
            on_terminate(0);
        }
        close(pipes[i]);
        printf("%s%d:%s", i == 0 ? " children=" : ",", children[i], port);
    }
}

static void usage(void) {
    fputs("usage: counter --port N [--mib M] [--devices 0,1] [--start 100] [--managed] [--fork N] [--cpu-parent]\n"
          "               [--no-cuda] [--cuda-after FILE] [--by-file] [--no-shm] [--visible 1,0]\n",
          stderr);
    exit(2);
}

static uint64_t number(const char *text) {
    char *end;
    errno = 0;
    if (text == NULL)
        usage();
    unsigned long long value = strtoull(text, &end, 10);
    if (end == text || *end != '\0' || *text == '-' || errno != 0)
        usage();
    return value;
}

static void parse_devices(struct options *options, char *text) {
    char *name;
    options->device_count = 0;
    while ((name = strsep(&text, ",")) != NULL) {
        if (options->device_count == MAX_DEVICES)
            usage();
        options->devices[options->device_count++] = (int)number(name);
    }
}

/* An option with a value. False: not one of them. */
static bool parse_valued(struct options *options, const char *option, char *value) {
    if (strcmp(option, "--port") == 0)
        options->port = (int)number(value);
    else if (strcmp(option, "--mib") == 0)
        options->random_mib = number(value);
    else if (strcmp(option, "--start") == 0)
        options->start = number(value);
    else if (strcmp(option, "--fork") == 0)
        options->children = (int)number(value);
    else if (strcmp(option, "--devices") == 0 && value != NULL)
        parse_devices(options, value);
    else if (strcmp(option, "--cuda-after") == 0 && value != NULL)
        options->cuda_after = value;
    else if (strcmp(option, "--visible") == 0 && value != NULL)
        setenv("CUDA_VISIBLE_DEVICES", value, 1); /* as a program does that chooses its GPU itself */
    else
        return false;
    return true;
}

static bool parse_flag(struct options *options, const char *option) {
    if (strcmp(option, "--managed") == 0)
        options->managed = true;
    else if (strcmp(option, "--no-cuda") == 0)
        options->no_cuda = true;
    else if (strcmp(option, "--cpu-parent") == 0)
        options->cpu_parent = true;
    else if (strcmp(option, "--by-file") == 0)
        options->by_file = true;
    else if (strcmp(option, "--no-shm") == 0)
        options->no_shm = true;
    else
        return false;
    return true;
}

static void parse(struct options *options, int count, char **arguments) {
    *options = (struct options){.port = -1, .start = 100, .device_count = 1};
    for (int i = 1; i < count; i++) {
        if (parse_flag(options, arguments[i]))
            continue;
        if (!parse_valued(options, arguments[i], arguments[i + 1]))
            usage();
        i++;
    }
    if (options->port < 0 || options->port > 65535 || options->children > MAX_CHILDREN)
        usage();
}

int main(int count, char **arguments) {
    struct options options;
    int pipes[MAX_CHILDREN], ready = -1;
    char description[2 * TEXT_BYTES], text[16];
    parse(&options, count, arguments);
    signal(SIGTERM, on_terminate);
    signal(SIGINT, on_terminate);
    signal(SIGCHLD, SIG_IGN); /* children that end leave no zombies */

    if (options.children > 0 && !options.no_shm)
        map_as_ranks();
    int child = fork_children(options.children, getpid(), pipes, &ready);
    if (child > 0 && options.port != 0)
        options.port += child;
    if (child == 0 && options.cpu_parent)
        options.no_cuda = true;
    int socket_fd = options.by_file ? -1 : open_socket(&options.port);
    state_begin(&options);
    if (!options.no_cuda && options.cuda_after == NULL)
        state_to_gpu();

    if (child > 0) {
        snprintf(text, sizeof text, "%d", options.port);
        if (write(ready, text, strlen(text)) < 0)
            fail("write");
        close(ready);
    } else {
        state_describe(description);
        printf("ready pid=%d port=%d %s", getpid(), options.port, description);
        print_children(pipes);
        puts("");
        fflush(stdout);
    }
    serve(socket_fd, &options);
    return EXIT_SUCCESS;
}
