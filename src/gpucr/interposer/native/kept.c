/* What a process keeps for its restore; its gate stays closed meanwhile. Only the agent's: no lock needed. */
#include "carry.h"
#include "socket.h"

#include <fcntl.h>
#include <unistd.h>

static struct owned kept[KEPT] = {{.number = -1}, {.number = -1}};

/* Also what the program has closed since: then the memory is lost, and the process must not run. */
bool kept_anything(void) {
    for (int i = 0; i < KEPT; i++)
        if (kept[i].number >= 0)
            return true;
    return false;
}

int kept_number(enum kept what) {
    return descriptor_is_ours(&kept[what]) ? kept[what].number : -1;
}

void kept_close(void) {
    for (int i = 0; i < KEPT; i++)
        descriptor_close(&kept[i]);
}

uint32_t kept_take(struct packet *asked) {
    if (asked->descriptor_count > 1 || asked->head.a >= KEPT)
        return MALFORMED;
    if (asked->descriptor_count == 0) {
        kept_close();
        return DONE;
    }
    struct owned copy = descriptor_own(descriptor_copy_high(asked->descriptors[0].number));
    if (copy.number < 0)
        return NO_DESCRIPTORS;
    descriptor_close(&kept[asked->head.a]);
    kept[asked->head.a] = copy;
    return DONE;
}

uint32_t kept_give(uint64_t what, struct packet *answer) {
    if (what >= KEPT)
        return MALFORMED;
    if (kept[what].number < 0)
        return DONE;
    if (!descriptor_is_ours(&kept[what]))
        return CLOSED_BY_PROGRAM;
    int copy = fcntl(kept[what].number, F_DUPFD_CLOEXEC, 3);
    if (copy < 0)
        return NO_DESCRIPTORS;
    packet_add(answer, copy);
    return DONE;
}
