/*
 * descriptors.c: the interposer's own descriptors, in a program that may close any number and use it again (daemons
 * close all that they find, launchers call close_range). Each is known by its file, and is looked at before it is used
 * or closed: a number that leads to another file is the program's. Between the look and the use are two system calls
 * with nothing in between; what stays open has a number that the program does not get by itself.
 */
#ifndef GPUCR_INTERPOSER_DESCRIPTORS_H
#define GPUCR_INTERPOSER_DESCRIPTORS_H

#include <stdbool.h>
#include <sys/resource.h>
#include <sys/types.h>

struct identity {
    dev_t device;
    ino_t inode;
};
struct owned {
    int number; /* -1: none */
    struct identity file;
};
#define NOTHING_OWNED ((struct owned){.number = -1})

bool descriptor_identify(int number, struct identity *file); /* false: it is not open */
struct owned descriptor_own(int number);                     /* as it is, for a moment */
struct owned descriptor_keep(int number); /* under a high number, if one is free; else as it is */
int descriptor_copy_high(int number);     /* -1: none is free */
/* In the upper half of so many numbers: the program's own stay low, so select() keeps working. */
int descriptor_copy_upper(int number, rlim_t limit);
bool descriptor_is_ours(const struct owned *owned);
void descriptor_close(struct owned *owned); /* unless it is the program's by now */

#endif
