/* Faults to inject, as GPUCR_SIM_FAULTS (target) and GPUCR_SIM_CALLER_FAULTS (caller) name them. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const ACTION_NAMES[ACTIONS] = {"state", "tid", "lock", "checkpoint", "restore", "unlock", "complete",
                                                 "create", "export", "import", "map", "access", "context"};

void sleep_ms(uint32_t duration_ms) {
    struct timespec left = {.tv_sec = duration_ms / 1000, .tv_nsec = (long)(duration_ms % 1000) * 1000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) != 0)
        ;
}

void hang(void) {
    while (true)
        pause();
}

/* What to do before the action. */
void fault_wait(const struct fault *fault) {
    if (fault->kind == FAULT_DELAY)
        sleep_ms(fault->value);
    while (fault->kind == FAULT_UNTIL && access(fault->path, F_OK) != 0)
        sleep_ms(1);
}

static bool parse_number(const char **text, uint32_t *number) {
    char *end;
    unsigned long value = strtoul(*text, &end, 10);
    if (end == *text || value > UINT32_MAX)
        return false;
    *number = (uint32_t)value;
    *text = end;
    return true;
}

static bool parse_effect(struct fault *fault, const char *text) {
    if (strcmp(text, "hang") == 0) {
        fault->kind = FAULT_HANG;
        return true;
    }
    if (strcmp(text, "die") == 0) {
        fault->kind = FAULT_DIE;
        return true;
    }
    if (strncmp(text, "until:", 6) == 0) {
        fault->kind = FAULT_UNTIL;
        int length = snprintf(fault->path, sizeof fault->path, "%s", text + 6);
        return length > 0 && (size_t)length < sizeof fault->path;
    }
    fault->kind = FAULT_RESULT;
    if (strncmp(text, "delay:", 6) == 0) {
        fault->kind = FAULT_DELAY;
        text += 6;
    }
    if (!parse_number(&text, &fault->value))
        return false;
    if (fault->kind == FAULT_RESULT && strcmp(text, ":failed") == 0) {
        fault->then_failed = true;
        return true;
    }
    return *text == '\0';
}

static bool parse_one(struct fault *fault, const char *text) {
    size_t length = strcspn(text, "@#=");
    uint32_t number;
    memset(fault, 0, sizeof *fault);
    fault->action = ACTIONS;
    for (int action = 0; action < ACTIONS; action++)
        if (strlen(ACTION_NAMES[action]) == length && strncmp(text, ACTION_NAMES[action], length) == 0)
            fault->action = (enum action)action;
    text += length;
    if (fault->action == ACTIONS)
        return false;
    if (*text == '@') {
        text++;
        if (!parse_number(&text, &number))
            return false;
        fault->pid = (pid_t)number;
    }
    if (*text == '#') {
        text++;
        if (!parse_number(&text, &fault->nth) || fault->nth == 0)
            return false;
    }
    return *text == '=' && parse_effect(fault, text + 1);
}

bool faults_parse(struct faults *faults, const char *variable) {
    faults->count = 0;
    const char *value = getenv(variable);
    if (value == NULL || *value == '\0')
        return true;
    char text[1024];
    bool good = (size_t)snprintf(text, sizeof text, "%s", value) < sizeof text;
    char *rest = text, *item;
    while (good && (item = strsep(&rest, ",")) != NULL)
        good = faults->count < MAX_FAULTS && parse_one(&faults->list[faults->count++], item);
    if (!good)
        fprintf(stderr,
                "gpucr simulator: %s=%s is not of the form ACTION[@PID][#NTH]=RESULT|hang|die|delay:MS|until:PATH\n",
                variable, value);
    return good;
}

struct fault faults_pick(const struct faults *faults, enum action action, pid_t pid, uint32_t nth) {
    for (uint32_t i = 0; i < faults->count; i++) {
        const struct fault *fault = &faults->list[i];
        if (fault->action == action && (fault->pid == 0 || fault->pid == pid) &&
            (fault->nth == 0 || fault->nth == nth))
            return *fault;
    }
    return (struct fault){.kind = FAULT_NONE};
}
