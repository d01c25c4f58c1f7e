/*
 * ranks: a parent and N rank processes that all-reduce forever, like a training job with NCCL. The parent uses no CUDA.
 * When all ranks have done a step it prints a line that begins with "ready".
 */
#include "ranks.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "collective.h"

static pid_t pids[MAX_RANKS];
static volatile sig_atomic_t started;

static void end(int status) {
    for (int i = 0; i < started; i++)
        kill(pids[i], SIGKILL);
    _exit(status);
}

static void on_terminate(int signal_number) {
    (void)signal_number;
    end(EXIT_SUCCESS);
}

/* The others would wait forever for one that ends while they join; its own message says why. */
static void on_early_end(int signal_number) {
    (void)signal_number;
    end(EXIT_FAILURE);
}

static void fail(const char *what) {
    fprintf(stderr, "ranks: %s: %s\n", what, strerror(errno));
    end(EXIT_FAILURE);
}

static void usage(void) {
    fputs("usage: ranks N --status-dir DIR [--mib M] [--step-us 5000] [--skew-percent 50] [--gpu-us 0] [--queue 4]\n",
          stderr);
    exit(2);
}

static uint64_t number(const char *text, uint64_t least, uint64_t most) {
    char *end;
    errno = 0;
    if (text == NULL)
        usage();
    unsigned long long value = strtoull(text, &end, 10);
    if (end == text || *end != '\0' || *text == '-' || errno != 0 || value < least || value > most)
        usage();
    return value;
}

static void parse(struct job *job, char **arguments) {
    const uint64_t hour_us = 3600000000u;
    *job = (struct job){.step_us = 5000, .skew_percent = 50, .queue = 4};
    job->ranks = (uint32_t)number(*++arguments, 1, MAX_RANKS);
    while (*++arguments != NULL) {
        const char *option = *arguments++;
        if (strcmp(option, "--status-dir") == 0)
            job->status_dir = *arguments;
        else if (strcmp(option, "--mib") == 0)
            job->random_mib = number(*arguments, 0, 1u << 20);
        else if (strcmp(option, "--step-us") == 0)
            job->step_us = number(*arguments, 0, hour_us);
        else if (strcmp(option, "--skew-percent") == 0)
            job->skew_percent = number(*arguments, 0, 100);
        else if (strcmp(option, "--gpu-us") == 0)
            job->gpu_us = number(*arguments, 0, hour_us);
        else if (strcmp(option, "--queue") == 0)
            job->queue = (uint32_t)number(*arguments, 1, LANE_DEPTH / 4);
        else
            usage();
        if (*arguments == NULL)
            usage();
    }
    if (job->status_dir == NULL)
        usage();
}

static void start_rank(const struct job *job, uint32_t rank, int ready[2]) {
    pid_t parent = getpid(), pid = fork();
    if (pid < 0)
        fail("fork");
    if (pid == 0) {
        started = 0;
        signal(SIGTERM, SIG_DFL);
        signal(SIGINT, SIG_DFL);
        signal(SIGCHLD, SIG_DFL);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a killed parent leaves no ranks behind */
        if (getppid() != parent)
            _exit(EXIT_FAILURE);
        close(ready[0]);
        rank_run(job, rank, ready[1]);
    }
    pids[rank] = pid;
    started = (sig_atomic_t)(rank + 1);
}

int main(int count, char **arguments) {
    struct job job;
    int ready[2];
    char byte;
    if (count < 2)
        usage();
    parse(&job, arguments);
    if (mkdir(job.status_dir, 0700) < 0 && errno != EEXIST)
        fail(job.status_dir);
    snprintf(job.segment, sizeof job.segment, "/dev/shm/nccl-sim-%d", getpid());
    unlink(job.segment); /* left by an older job, which died before all had joined */
    signal(SIGTERM, on_terminate);
    signal(SIGINT, on_terminate);
    signal(SIGCHLD, on_early_end);
    if (pipe(ready) < 0)
        fail("pipe");
    for (uint32_t rank = 0; rank < job.ranks; rank++)
        start_rank(&job, rank, ready);
    close(ready[1]);
    for (uint32_t rank = 0; rank < job.ranks; rank++)
        if (read(ready[0], &byte, 1) != 1)
            fail("a rank");
    close(ready[0]);
    signal(SIGCHLD, SIG_IGN); /* ranks that end leave no zombies */
    printf("ready pid=%d ranks=", getpid());
    for (uint32_t rank = 0; rank < job.ranks; rank++)
        printf("%s%d", rank == 0 ? "" : ",", pids[rank]);
    puts("");
    fflush(stdout);
    while (true)
        pause();
}
