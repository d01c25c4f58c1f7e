/* The machine as the environment describes it: GPUCR_SIM_GPUS, GPUCR_SIM_MACHINE, GPUCR_SIM_STATE. */
#include "machine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t splitmix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t fnv1a(const char *text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *text != '\0'; text++)
        hash = (hash ^ (uint8_t)*text) * 0x100000001b3u;
    return hash;
}

static void make_uuid(const char *machine_name, uint32_t index, uint8_t uuid[UUID_BYTES]) {
    uint64_t seed = fnv1a(machine_name);
    for (int half = 0; half < 2; half++) {
        uint64_t word = splitmix64(seed + 2 * (uint64_t)index + (uint64_t)half);
        memcpy(uuid + 8 * half, &word, sizeof word);
    }
    uuid[6] = (uint8_t)((uuid[6] & 0x0f) | 0x40); /* the version and variant bits of a random UUID */
    uuid[8] = (uint8_t)((uuid[8] & 0x3f) | 0x80);
}

/* "16GiB", "512MiB" or plain bytes; moves *text past it. 0: malformed. */
static uint64_t parse_size(const char **text) {
    char *end;
    errno = 0;
    unsigned long long number = strtoull(*text, &end, 10);
    if (end == *text || errno != 0)
        return 0;
    unsigned shift = 0;
    if (strncmp(end, "GiB", 3) == 0)
        shift = 30;
    else if (strncmp(end, "MiB", 3) == 0)
        shift = 20;
    *text = end + (shift != 0 ? 3 : 0);
    return number > (1ull << 40 >> shift) ? 0 : (uint64_t)number << shift;
}

/* "2x16GiB,80GiB": groups of [COUNTx]SIZE. */
static bool parse_gpus(struct machine *machine, const char *text) {
    while (true) {
        char *behind_count;
        unsigned long count = strtoul(text, &behind_count, 10);
        if (behind_count != text && *behind_count == 'x')
            text = behind_count + 1;
        else
            count = 1;
        uint64_t capacity = parse_size(&text);
        if (capacity == 0 || count == 0 || count > MAX_GPUS - machine->gpu_count)
            return false;
        for (; count > 0; count--) {
            struct gpu *gpu = &machine->gpus[machine->gpu_count];
            make_uuid(machine->name, machine->gpu_count, gpu->uuid);
            gpu->capacity_bytes = capacity;
            machine->gpu_count++;
        }
        if (*text == '\0')
            return true;
        if (*text++ != ',')
            return false;
    }
}

static bool copy_text(char *to, size_t size, const char *from) {
    return (size_t)snprintf(to, size, "%s", from) < size;
}

bool machine_from_environment(struct machine *machine) {
    memset(machine, 0, sizeof *machine);
    const char *name = getenv("GPUCR_SIM_MACHINE");
    const char *gpus = getenv("GPUCR_SIM_GPUS");
    const char *state_dir = getenv("GPUCR_SIM_STATE");
    char default_dir[64];
    /* Not in /dev/shm: a job in its own namespaces has a different one. */
    snprintf(default_dir, sizeof default_dir, "/tmp/gpucr-sim-%u", (unsigned)geteuid());

    if (!copy_text(machine->name, sizeof machine->name, name != NULL ? name : "local") ||
        !copy_text(machine->state_dir, sizeof machine->state_dir, state_dir != NULL ? state_dir : default_dir)) {
        fprintf(stderr, "gpucr simulator: GPUCR_SIM_MACHINE or GPUCR_SIM_STATE is too long\n");
        return false;
    }
    if (!parse_gpus(machine, gpus != NULL ? gpus : "2x16GiB")) {
        fprintf(stderr, "gpucr simulator: GPUCR_SIM_GPUS=%s is not of the form 2x16GiB[,80GiB...] (at most %d GPUs of 1 TiB)\n",
                gpus, MAX_GPUS);
        return false;
    }
    return true;
}

int machine_find(const struct machine *machine, const uint8_t uuid[UUID_BYTES]) {
    for (uint32_t i = 0; i < machine->gpu_count; i++)
        if (memcmp(machine->gpus[i].uuid, uuid, UUID_BYTES) == 0)
            return (int)i;
    return -1;
}

void gpu_name(uint32_t index, char *text, size_t size) {
    (void)index; /* all GPUs of a machine are the same model */
    const char *model = getenv("GPUCR_SIM_MODEL");
    snprintf(text, size, "%s", model != NULL && *model ? model : "Simulated GPU");
}

void uuid_text(const uint8_t uuid[UUID_BYTES], char text[41]) {
    char *at = text + sprintf(text, "GPU-");
    for (int i = 0; i < UUID_BYTES; i++)
        at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}

uint64_t environment_number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    char *end;
    if (text == NULL || *text == '\0')
        return otherwise;
    unsigned long long number = strtoull(text, &end, 10);
    return *end == '\0' ? number : otherwise;
}

bool environment_word(const char *name, const char *const words[], int *chosen) {
    const char *text = getenv(name);
    if (text == NULL)
        return true;
    for (int i = 0; words[i] != NULL; i++)
        if (strcmp(text, words[i]) == 0) {
            *chosen = i;
            return true;
        }
    fprintf(stderr, "gpucr simulator: %s=%s is none of", name, text);
    for (int i = 0; words[i] != NULL; i++)
        fprintf(stderr, "%s %s", i == 0 ? "" : ",", words[i]);
    fputc('\n', stderr);
    return false;
}
