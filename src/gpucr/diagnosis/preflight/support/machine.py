"""The machine: room for what is moved, clocks, capabilities, cgroups."""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact

HOST_MEMORY = Fact(
    what="{free} of host memory are available",
    consequence="{missing} are missing, and the kernel would kill processes",
    remedy="end other programs, or add memory",
    code="GPUCR-HOST-MEMORY",
    case="too little",
)
CGROUP_MEMORY = Fact(
    what="a cgroup has {free} of its host memory left",
    consequence="{missing} are missing, and the kernel would kill processes of the cgroup",
    remedy="raise {limit}, in a container its memory limit, or end other programs of that cgroup",
    code="GPUCR-HOST-MEMORY",
    case="too little",
    warning_if="the limit only slows it down (`memory.high`)",
    warning_consequence="{missing} are missing, and the kernel slows the processes of the cgroup down, perhaps to a "
    "standstill",
)
DISK = Fact(
    what="{folder} has {free} free",
    consequence="the snapshot needs up to {needed}, {missing} more",
    remedy="free some space, or name a folder on another disk with --to",
    code="GPUCR-NO-SPACE",
    case="too little",
    warning_if="it may do",
)
DISK_OF_STORE = Fact(
    what=DISK.what,
    consequence=DISK.consequence + "; less what the store has already, and what compression saves",
    remedy=DISK.remedy,
    code="GPUCR-NO-SPACE",
    case="too little, of a store",
    warning_if=DISK.warning_if,
)
NO_ROOM_TO_HAND_OVER = Fact(
    what="neither host memory nor a disk has room for {size} of device memory",
    consequence="the memory that the driver hands over must be kept somewhere until it is saved",
    remedy="free host memory, or name a folder on a larger disk with TMPDIR; dumps into a folder need neither",
    code="GPUCR-HOST-MEMORY",
    case="custom storage",
)
SPOOL = Fact(
    what="{size} of device memory go through an unencrypted file in {folder}",
    consequence="the job stands still for as long as that disk needs; the file has no name, and is gone when all is "
    "saved",
    remedy="free host memory, or name a folder on a faster, or an encrypted, disk with TMPDIR",
    severity="warning",
    case="custom storage",
)
SPOOL_BESIDE_TARGET = Fact(
    what="{folder} and {target} are on one disk",
    consequence="where the store saves less than {missing} of it, the dump fails, and is undone",
    remedy="free some space, or name a folder on another disk with TMPDIR",
    code="GPUCR-NO-SPACE",
    severity="warning",
    case="custom storage, and too little room for both",
)
IMAGES_ON_DISK = Fact(
    what="CRIU's images lie in {folder} until they are in the store",
    consequence="the store is encrypted; gpucr cannot tell whether that disk is",
    remedy="name a folder in memory, or on an encrypted disk, with TMPDIR",
    severity="warning",
)
CLOCKS_JUMP = Fact(
    what="the job's clocks jump to those of this machine",
    consequence="CLOCK_MONOTONIC and CLOCK_BOOTTIME may even go back: timeouts end at once, or much too late",
    remedy="dump and restore as root, on kernels with CONFIG_TIME_NS (Linux 5.6 and newer)",
    code="GPUCR-CLOCKS",
    severity="warning",
    case="without time namespaces, or not as root",
)
CLOCKS = Fact(
    what="the job's clocks cannot be set",
    consequence="CRIU continues them from their values at the dump, and fails if it may not",
    remedy="give the container CAP_SYS_TIME, or restore outside it; the machine's own clock stays as it is",
    code="GPUCR-CLOCKS",
)
CAPABILITIES = Fact(
    what="the job had {capabilities} that a restore here cannot give it",
    consequence="CRIU fails, or hangs if the job has several threads",
    remedy="restore with the privileges of the dump: outside the container, or give it these capabilities",
    code="GPUCR-CAPABILITIES",
)
CGROUP_V1 = Fact(
    what="the container is in a cgroup of version 1's freezer",
    consequence="CRIU would hang when it freezes the container",
    remedy="boot the machine with cgroup version 2 alone (systemd.unified_cgroup_hierarchy=1)",
    code="GPUCR-CGROUP-V1",
)
ARCHITECTURE = Fact(
    what="the snapshot is of a {architecture} machine",
    consequence="its programs cannot run here",
    remedy="restore it on a machine of that kind",
    code="GPUCR-ARCHITECTURE",
)
PROCESSOR = Fact(
    what="this processor lacks {features}",
    consequence="the job's programs may have chosen these instructions when they started: then they die of SIGILL, or "
    "compute something else",
    remedy="restore it on a processor with {least}, or start it again with its programs kept to fewer instructions",
    code="GPUCR-PROCESSOR",
    warning_if="no compiler chooses what is missing by itself",
    warning_consequence="a program written with these instructions by hand dies of SIGILL",
)
MORE_REGISTERS = Fact(
    what="this processor has more registers to save than that of the dump",
    consequence="glibc's dynamic linker has too little room for them on the stack: a program that calls a library's "
    "function for the first time overwrites its own data, or dies of SIGSEGV",
    remedy="restore it on a processor like that of the dump; programs started with LD_BIND_NOW=1 can be restored with "
    "--force",
    code="GPUCR-PROCESSOR",
    warning_if="the processor of the dump had XSAVEC",
    warning_consequence="code that is loaded or compiled from now on may use them, and glibc's dynamic linker has no "
    "room for them on the stack when a function is called for the first time",
)
OTHER_USER = Fact(
    what="the job was {name}'s, with uid {uid}, which is {here}'s on this machine",
    consequence="{here} could read and change its memory, and it could change {here}'s files",
    remedy="restore it where {name} has that number",
    code="GPUCR-OTHER-USER",
    warning_if="no user of this machine has the number",
    warning_consequence="it runs as a user that does not exist here",
)
OTHER_VENDOR = Fact(
    what="the processor of the dump was of another maker ({vendor})",
    consequence="libraries keep what they chose for it, and approximate instructions (RSQRTPS, RCPPS) give other last "
    "bits",
    remedy="restore it on a processor of that maker if results must be equal bit for bit",
    severity="warning",
)
