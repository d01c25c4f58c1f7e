/* What a process keeps for its restore; its gate stays closed meanwhile. Only the agent's: no lock needed. */
#include "carry.h"
#include "socket.h"

#include <fcntl.h>
#include <unistd.h>

static int kept[KEPT] = {-1, -1};

bool kept_anything(void) {
    for (int i = 0; i < KEPT; i++)
        if (kept[i] >= 0)
            return true;
    return false;
}

int kept_number(enum kept what) {
    return kept[what];
}

void kept_close(void) {
    for (int i = 0; i < KEPT; i++) {
        if (kept[i] >= 0)
            close(kept[i]);
        kept[i] = -1;
    }
}

uint32_t kept_take(struct packet *asked) {
    if (asked->descriptor_count > 1 || asked->head.a >= KEPT)
        return MALFORMED;
    if (asked->descriptor_count == 0) {
        kept_close();
        return DONE;
    }
    if (kept[asked->head.a] >= 0)
        close(kept[asked->head.a]);
    kept[asked->head.a] = asked->descriptors[0];
    asked->descriptor_count = 0; /* it is not closed with the others */
    return DONE;
}

uint32_t kept_give(uint64_t what, struct packet *answer) {
    if (what >= KEPT)
        return MALFORMED;
    if (kept[what] < 0)
        return DONE;
    int copy = fcntl(kept[what], F_DUPFD_CLOEXEC, 3);
    if (copy < 0)
        return NO_DESCRIPTORS;
    answer->descriptors[answer->descriptor_count++] = copy;
    return DONE;
}
