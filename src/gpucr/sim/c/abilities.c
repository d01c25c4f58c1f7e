/* Capabilities of the simulated driver and its machine: GPUCR_SIM_DRIVER, GPUCR_SIM_PEERS, GPUCR_SIM_MIG. */
#include "machine.h"

/* Later drivers bring back what driver 580 loses. */
static const char *const GENERATIONS[] = {"580", "610", "615", "future", NULL};

enum generation driver_generation(void) {
    int chosen = DRIVER_580;
    environment_word("GPUCR_SIM_DRIVER", GENERATIONS, &chosen); /* an unknown word is reported on stderr */
    return (enum generation)chosen;
}

bool machine_has_peers(void) {
    return environment_number("GPUCR_SIM_PEERS", 0) != 0;
}

bool machine_has_mig(void) {
    return environment_number("GPUCR_SIM_MIG", 0) != 0;
}
