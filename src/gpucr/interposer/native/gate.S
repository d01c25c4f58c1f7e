/* The stubs for the processor that is compiled for. */
#if defined __x86_64__
#include "gate_x86_64.S"
#elif defined __aarch64__
#include "gate_aarch64.S"
#else
#error "the interposer is for x86-64 and aarch64"
#endif
