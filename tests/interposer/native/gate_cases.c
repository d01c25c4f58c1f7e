/*
 * gate_cases CASE: does something with the gate in its way. It says "ready", does the rest when a line comes, and says how it
 * went. "inside" cases leave a driver call in some unusual way before they are ready: the gate has to be found empty.
 */
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

struct handle {
    char bytes[64];
};

static int (*init)(unsigned), (*call)(void (*)(void *), void *), (*wait_inside)(int), (*synchronize)(void);
static int (*begin)(void *, int), (*end)(void *, void *), (*capturing)(int), (*destroy)(void *);
static int (*sum)(long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, double,
                  double);
static int (*by_struct)(int *, struct handle, unsigned);
static void *library;

static void *find(const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        printf("no %s\n", name);
        exit(1);
    }
    return found;
}

static void say(const char *text) {
    printf("%s\n", text);
    fflush(stdout);
}

static void wait_line(void) {
    char line[64];
    if (fgets(line, sizeof line, stdin) == NULL)
        exit(2);
}

static jmp_buf target;

static void jump_out(void *unused) {
    (void)unused;
    longjmp(target, 1);
}

static void case_longjmp(void) {
    if (setjmp(target) == 0)
        call(jump_out, NULL);
}

static void call_and_jump(void *unused) {
    (void)unused;
    call(jump_out, NULL);
}

static void case_longjmp_twice(void) {
    if (setjmp(target) == 0)
        call(call_and_jump, NULL);
}

static void handler(int unused) {
    (void)unused;
    siglongjmp(target, 1);
}

static void raise_signal(void *unused) {
    (void)unused;
    raise(SIGUSR1);
}

static void case_longjmp_from_signal_stack(void) {
    static char room[1 << 16];
    stack_t stack = {.ss_sp = room, .ss_size = sizeof room};
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
    sigaltstack(&stack, NULL);
    sigaction(SIGUSR1, &action, NULL);
    if (sigsetjmp(target, 1) == 0)
        call(raise_signal, NULL);
}

static void leave_thread(void *unused) {
    (void)unused;
    pthread_exit(NULL);
}

static void *exits(void *unused) {
    call(leave_thread, unused);
    return NULL;
}

static void end_thread(void *unused) {
    (void)unused;
    syscall(SYS_exit, 0);
}

static void *ends(void *unused) {
    call(end_thread, unused);
    return NULL;
}

static void *waits(void *unused) {
    (void)unused;
    wait_inside(1000);
    return NULL;
}

static void case_pthread_exit(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, exits, NULL);
    pthread_join(thread, NULL);
}

static void case_raw_exit(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, ends, NULL);
    pthread_join(thread, NULL);
}

static void case_cancel(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, waits, NULL);
    usleep(20000);
    pthread_cancel(thread);
    pthread_join(thread, NULL);
}

static void case_many_threads(void) {
    pthread_t threads[64];
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 64; i++)
            pthread_create(&threads[i], NULL, exits, NULL);
        for (int i = 0; i < 64; i++)
            pthread_join(threads[i], NULL);
    }
}

/* Its end fails; the driver says that it is over. */
static void case_failed_capture(void) {
    begin((void *)16, 0);
    capturing(0);
    end((void *)16, NULL);
}

static void case_capture_of_destroyed_stream(void) {
    begin((void *)16, 0);
    destroy((void *)16);
}

static volatile sig_atomic_t handled;

static void on_signal(int number) {
    void *frames[32];
    backtrace(frames, 32); /* as a profiler does */
    handled++;
    if (number == SIGUSR1)
        say("handler");
    synchronize();
}

static void handle(int number) {
    void *frames[2];
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    backtrace(frames, 2); /* which loads a library when it is first called */
    sigaction(number, &action, NULL);
}

static void busy(void *until) {
    while (handled < (long)until)
        sum(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0.5, 0.25);
}

/* A profiler's signals arrive in calls, in the gate itself, and in calls within calls; the handler calls CUDA. */
static void case_signals(void) {
    struct itimerval every = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    handle(SIGPROF);
    setitimer(ITIMER_PROF, &every, NULL);
    busy((void *)100);
    call(busy, (void *)200);
    setitimer(ITIMER_PROF, &never, NULL);
}

static volatile sig_atomic_t enough;

static void *keeps_calling(void *unused) {
    while (!enough)
        synchronize();
    return unused;
}

static void nothing(int signal) {
    (void)signal;
}

static void *keeps_interrupting(void *threads) {
    while (!enough)
        for (int i = 0; i < 64; i++)
            pthread_kill(((pthread_t *)threads)[i], SIGUSR2);
    return NULL;
}

/* Calls begin and end all the time while the gate is closed and opened; interrupted ones come to the gate again and again. */
static void busy_threads(bool are_interrupted) {
    static pthread_t threads[64];
    const struct sigaction without_restart = {.sa_handler = nothing};
    pthread_t interrupting = 0;
    sigaction(SIGUSR2, &without_restart, NULL);
    for (int i = 0; i < 64; i++)
        pthread_create(&threads[i], NULL, keeps_calling, NULL);
    if (are_interrupted)
        pthread_create(&interrupting, NULL, keeps_interrupting, threads);
    say("busy");
    wait_line();
    enough = 1;
    if (are_interrupted)
        pthread_join(interrupting, NULL);
    for (int i = 0; i < 64; i++)
        pthread_join(threads[i], NULL);
}

static void nested(void *unused) {
    (void)unused;
    say("inside");
    wait_line();
    say(synchronize() == 0 ? "nested" : "failed");
}

static void count_frames(void *frames) {
    void *found[32];
    *(int *)frames = backtrace(found, 32);
}

static void arguments(void) {
    int frames = 0, total = 0;
    struct handle handle;
    memset(&handle, 3, sizeof handle);
    call(count_frames, &frames);
    printf("sum %d\n", sum(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0.5, 0.25));
    printf("struct %d", by_struct(&total, handle, 7));
    printf(" %d\n", total);
    printf("frames %s\n", frames >= 5 ? "enough" : "too few");
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int bad = 0;
    while (fgets(line, sizeof line, maps) != NULL)
        bad += strstr(line, " rwx") != NULL;
    fclose(maps);
    printf("rwx %d\n", bad);
}

static void forks(void) {
    wait_line(); /* the gate is closed now */
    pid_t child = fork();
    if (child == 0)
        _exit(synchronize() == 0 ? 7 : 1);
    int status;
    waitpid(child, &status, 0);
    say(WIFEXITED(status) && WEXITSTATUS(status) == 7 ? "child passed" : "child failed");
}

static const struct {
    const char *name;
    void (*leave)(void);
} CASES[] = {
    {"longjmp", case_longjmp},
    {"longjmp-twice", case_longjmp_twice},
    {"longjmp-from-signal-stack", case_longjmp_from_signal_stack},
    {"pthread-exit", case_pthread_exit},
    {"raw-exit", case_raw_exit},
    {"cancel", case_cancel},
    {"many-threads", case_many_threads},
    {"signals", case_signals},
    {"failed-capture", case_failed_capture},
    {"capture-of-destroyed-stream", case_capture_of_destroyed_stream},
};

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        say(dlerror());
        return 1;
    }
    init = find("cuInit"), call = find("cuTestCall"), wait_inside = find("cuTestWait");
    synchronize = find("cuCtxSynchronize"), begin = find("cuStreamBeginCapture_v2"), end = find("cuStreamEndCapture");
    capturing = find("cuTestCapturing"), destroy = find("cuStreamDestroy_v2"), sum = find("cuTestSum");
    by_struct = find("cuTestStruct");
    init(0);
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++)
        if (strcmp(CASES[i].name, name) == 0)
            CASES[i].leave();
    if (strcmp(name, "arguments") == 0)
        arguments();
    if (strcmp(name, "capture") == 0) {
        begin((void *)16, 0);
        capturing(1);
        end((void *)16, NULL); /* fails, and the capture continues: the wrong thread */
    }
    if (strcmp(name, "nested") == 0)
        call(nested, NULL);
    say("ready");
    if (strcmp(name, "fork") == 0)
        forks();
    if (strcmp(name, "busy-threads") == 0 || strcmp(name, "interrupted-threads") == 0)
        busy_threads(name[0] == 'i');
    if (strcmp(name, "signal-in-the-gate") == 0)
        handle(SIGUSR1);
    wait_line();
    if (strcmp(name, "capture") == 0) {
        say(synchronize() == 0 ? "passed" : "failed"); /* although the gate is closed */
        capturing(0);
        end((void *)16, (void *)1);
    }
    say(synchronize() == 0 ? "done" : "failed");
    return 0;
}
