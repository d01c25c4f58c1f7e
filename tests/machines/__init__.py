"""Machines with kernels of their own: QEMU without KVM, Debian 12 and 13, booted by systemd."""
