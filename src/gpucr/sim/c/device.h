/* device.c: initialisation and the devices that this process sees. */
#ifndef GPUCR_SIM_DEVICE_H
#define GPUCR_SIM_DEVICE_H

#include "sim.h"

int cuda_version(void); /* api.c: of the driver, 13000 for 13.0 */
enum result library_initialize(void);
bool library_usable(void); /* false before cuInit, and in a child forked after it */
struct device *device_at(int ordinal); /* NULL: no such device */
int device_ordinal(const struct device *device);
enum result device_attribute(const struct device *device, int attribute, int *value);
enum result primary_retain(struct device *device, struct context **context);
enum result primary_release(struct device *device);
enum result primary_reset(struct device *device);

#endif
