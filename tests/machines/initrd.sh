#!/bin/busybox sh
# Mounts the first disk and hands the machine over to what the kernel's command line calls init=, systemd without it.
/bin/busybox mkdir -p /proc /dev /root
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
for module in virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk; do
    [ ! -e "/modules/$module.ko" ] || /bin/busybox insmod "/modules/$module.ko"
done
until [ -b /dev/vda ]; do /bin/busybox usleep 20000; done
/bin/busybox mount -t ext4 /dev/vda /root
/bin/busybox mount --move /dev /root/dev
/bin/busybox umount /proc
exec /bin/busybox switch_root /root /sbin/init
