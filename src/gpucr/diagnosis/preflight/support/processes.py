"""A job's processes, their descriptors and their pids."""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact

_CUDA_STATE = "{process} is in the CUDA state {state}"
_NO_ACTION = "the driver accepts no checkpoint or restore in it"
STATE_FAILED = Fact(
    what=_CUDA_STATE,
    consequence=_NO_ACTION,
    remedy="end and start the process again",
    code="GPUCR-CUDA-STATE",
    case="failed",
)
STATE_BEGUN = Fact(
    what=_CUDA_STATE,
    consequence=_NO_ACTION,
    remedy="wait until the tool that has begun this with the driver completes it; if that tool has died, end the "
    "process",
    code="GPUCR-CUDA-STATE",
    case="checkpointing, restoring",
)
STATE_UNKNOWN = Fact(
    what=_CUDA_STATE,
    consequence=_NO_ACTION,
    remedy="wait until the other tool that works on this process has finished",
    code="GPUCR-CUDA-STATE",
    case="one that this gpucr does not know",
)
LEFT_LOCKED = Fact(
    what="{process} is locked",
    consequence="it waits in its next CUDA call: what worked on it was killed, or is another tool. A resume, or a "
    "restore of its snapshot, lets it run",
    remedy="`gpucr resume {root}` lets it run now",
    code="GPUCR-CUDA-STATE",
    severity="warning",
)
TRACED = Fact(
    what="{process} is being traced",
    consequence="CRIU cannot attach to it",
    remedy="detach the debugger, strace or profiler with pid {tracer}",
    code="GPUCR-TRACED",
)
LIMITS = Fact(
    what="the resource limits of {process}, of user {uid}, may not be read",
    consequence="CRIU cannot dump it",
    remedy="run gpucr outside the container, or give the container CAP_SYS_RESOURCE",
    code="GPUCR-OTHER-UID-LIMITS",
)
SCRIPT = Fact(
    what="{process} is `script` of util-linux",
    consequence="it ends itself, and so the session that it records, when a dump or a restore interrupts its waiting",
    remedy="start the job without it: `gpucr run` keeps a log of what the job writes",
    severity="warning",
)
SESSION_OUTSIDE = Fact(
    what="the session of {process} began outside the job's pid namespace",
    consequence="CRIU cannot dump it",
    remedy="start the job with `gpucr run` or setsid",
    code="GPUCR-SESSION-OUTSIDE",
)
_ADOPTED = "{process} is in another session than its parent {parent}"
_NO_ADOPTION = "end it before the dump, or have it started by a process that stays, without a double fork"
ADOPTED_BY_ROOT = Fact(
    what=_ADOPTED,
    consequence="a restore would leave it outside the job's tree: the next dump would not have it",
    remedy=_NO_ADOPTION,
    code="GPUCR-ADOPTED",
    case="its parent is the job's root",
)
ADOPTED = Fact(
    what=_ADOPTED,
    consequence="CRIU could not restore the snapshot",
    remedy=_NO_ADOPTION,
    code="GPUCR-ADOPTED",
)
ROOT_NOT_MOUNTED = Fact(
    what="gpucr runs in a chroot whose root folder is not a mount",
    consequence="CRIU cannot dump or restore a job outside a sandbox there",
    remedy="mount the folder over itself before the chroot (`mount --rbind TREE TREE`), or start the job in a sandbox "
    "(`gpucr run` as root)",
    code="GPUCR-CHROOT",
)
NAMESPACE = Fact(
    what="{process} has a {namespaces} that the job's first process does not have",
    consequence="CRIU cannot dump it, or no restore would succeed",
    remedy="start that part without it (unshare, bwrap, a tool's own sandbox), or start the whole job in it with a "
    "container's runtime and dump the container",
    code="GPUCR-NESTED-NAMESPACE",
)
_LEFT_OUT = "it ends with the job, and no snapshot has it"
LEFT_OUT_CUDA = Fact(
    what="{process} uses CUDA in the job's {place}, but was not started by the job",
    consequence=_LEFT_OUT,
    remedy="end it first, or have the job's first process start it; `runc exec`, `docker exec` and `gpucr exec` start "
    "processes that a dump does not include",
    code="GPUCR-LEFT-OUT",
)
LEFT_OUT = Fact(
    what="{processes} in the job's {place} were not started by the job, or have lost their parent",
    consequence="they end with the job, and no snapshot has them",
    remedy="have the job's first process start what is to come back",
    severity="warning",
)
_CL = "its calls of OpenCL fail from the dump on, with an error; CUDA is not disturbed"
OPENCL_USED = Fact(
    what="{process} has made {count} contexts of OpenCL",
    consequence="no driver checkpoints them",
    remedy="have the program use CUDA alone (OpenMM: the platform CUDA)",
    code="GPUCR-OPENCL",
)
OPENCL_SEEN = Fact(
    what="{process} has looked for OpenCL devices, and uses none",
    consequence=_CL,
    remedy="start the program again if it is to use OpenCL",
    code="GPUCR-OPENCL",
    severity="warning",
)
OPENCL_UNKNOWN = Fact(
    what="{process} has OpenCL loaded, and no interposer that knows whether it is in use",
    consequence=f"if it is, the dump is refused when the job stands still, and the job continues; if not, {_CL}",
    remedy="start the job with `gpucr run`",
    code="GPUCR-OPENCL",
    severity="warning",
)
NO_USERS = Fact(
    what="{process} is in a user namespace without users",
    consequence="CRIU cannot record whose processes these are",
    remedy="map users in it (`unshare --map-root-user`), or start the job without one",
    code="GPUCR-NESTED-NAMESPACE",
)
NO_KEEPER = Fact(
    what="{process} is in another pid namespace than gpucr, and is not the first one there",
    consequence="CRIU dumps a pid namespace only as a whole",
    remedy="if gpucr started it, run gpucr as the same user, with the same /run: only keepers noted there are "
    "believed; if it is a container's, dump the container or run gpucr in it",
    code="GPUCR-NO-KEEPER",
)
TREES_SHARE = Fact(
    what="{processes}, of different trees, share something",
    consequence="CRIU dumps each tree by itself, and after a restore each would have its own",
    remedy="{how_to_dump_one_tree}",
    code="GPUCR-SEVERAL-TREES",
)
TERMINAL = Fact(
    what="{process} has a controlling terminal",
    consequence="it is stopped for the dump; an interactive shell then moves it to the background, where it continues",
    remedy="`fg` in that shell brings it back; jobs started with setsid have no terminal",
    severity="warning",
)
FOREIGN_TERMINAL = Fact(
    what="{process} has {terminal} open, a terminal of {other}, in a session of its own",
    consequence="CRIU cannot dump one side of a terminal for a job that leads its session",
    remedy="start the job with `gpucr run`, or with its input and output elsewhere (`</dev/null >log 2>&1`); inside "
    "tmux or ssh start it from a shell, which stays its session's leader",
    code="GPUCR-TERMINAL",
)
TWO_TERMINALS = Fact(
    what="the job has {terminals} open, terminals that processes outside it have made",
    consequence="CRIU can give a restored job one terminal",
    remedy="send its output to a file, or to one terminal",
    code="GPUCR-TERMINAL",
)
TERMINAL_TAKEN = Fact(
    what="{terminal} is a terminal of {other}",
    consequence="the job needs that number for a terminal of its own",
    remedy="end that program, or restore with --isolate: a sandbox has terminals of its own",
    code="GPUCR-TERMINAL",
)
IO_URING = Fact(
    what="{process} has an io_uring ring",
    consequence="CRIU cannot dump one",
    remedy="start the job without io_uring; for torch's TCPStore set USE_LIBUV=0",
    code="GPUCR-IO-URING",
)
UNDUMPABLE = Fact(
    what="{process} has a descriptor or mapping that CRIU cannot dump",
    consequence="the dump would fail",
    remedy="close it, or dump without the part of the program that needs it; one that is just starting CUDA: try again",
    code="GPUCR-UNSUPPORTED-FILE",
    kinds=(
        "userfaultfd, perf, bpf, kvm, landlock and others of the kernel",
        "devices but terminals and /dev/null and its like",
        "sockets but local, TCP, UDP, raw, netlink and packet",
        "POSIX message queues",
        "pipes in packet mode",
        "pidfds of threads",
    ),
)
FUSE = Fact(
    what="{process} serves a FUSE file system",
    consequence="CRIU stops it, and would then wait for that file system, with the job standing still",
    remedy="mount it from outside the job, before the job starts",
    code="GPUCR-FUSE",
)
FUSE_LEFT_OUT = Fact(
    what="{process} serves a FUSE file system in the job's {place}, but does not belong to the job",
    consequence="it ends with the job, and a restore misses what the job has on that file system",
    remedy="mount it from outside the job, before the job starts",
    code="GPUCR-FUSE",
)
SYSTEM_V = Fact(
    what="{process} uses shared memory of System V",
    consequence="CRIU dumps that only if the job has an IPC namespace of its own",
    remedy="start the job with `gpucr run`, whose sandbox has one; or use shm_open(3), or memory of mmap(2)",
    code="GPUCR-SYSTEM-V",
)
PROGRAM_IN_MEMORY = Fact(
    what="{process} runs a program from memory (memfd), not from a file",
    consequence="CRIU dumps it, and no restore would succeed",
    remedy="start the program from a file",
    code="GPUCR-UNSUPPORTED-FILE",
)
UNREAD = Fact(
    what="{process} has a netlink socket with messages that it has not read",
    consequence="CRIU cannot dump them",
    remedy="dump again when it has read them",
    code="GPUCR-UNSUPPORTED-FILE",
)
FOREIGN_FILE = Fact(
    what="{process} has a file open that lies on none of its mounts",
    consequence="CRIU cannot find it again",
    remedy="start the job with files that it opens itself, or that its own mount namespace has; `gpucr run` does so",
    code="GPUCR-FOREIGN-FILE",
)
NOT_ROOTS = Fact(
    what="{process} has files open that root may not open",
    consequence="CRIU cannot open them for root, in the dump or in the restore",
    remedy="let the user of the job dump it: `gpucr helper install` lets users do so",
    code="GPUCR-NOT-PERMITTED",
    case="NFS with root_squash, FUSE without allow_root",
)
_WATCHES = "{process} watches files (inotify, fanotify)"
WATCH = Fact(
    what=_WATCHES + " whose file system does not find them by their numbers",
    consequence="CRIU cannot find them, and the dump would fail",
    remedy="let it watch files elsewhere than on an overlay: on a volume or a tmpfs, or below /etc, /var/log and "
    "/var/spool, where CRIU looks for them; or dump when it no longer watches",
    code="GPUCR-WATCH",
    case="overlays, as a rule",
)
WATCH_BY_USER = Fact(
    what=_WATCHES + ", which only root finds by their numbers",
    consequence="CRIU cannot find them, and the dump would fail",
    remedy="let root dump it, or dump when it no longer watches",
    code="GPUCR-WATCH",
    case="an ordinary user's dump",
)
WATCH_OF_FILE_SYSTEM = Fact(
    what="{process} watches a whole file system (fanotify)",
    consequence="CRIU leaves that out without a word",
    remedy="let it watch a mount (FAN_MARK_MOUNT) or folders, or dump when it no longer watches",
    code="GPUCR-WATCH",
)
GPU_HELD = Fact(
    what="{process} holds an NVIDIA device without a CUDA context",
    consequence="CRIU cannot dump it",
    remedy="keep programs that render on GPUs, or monitor them, out of the tree; restart a worker that was "
    "forked from a CUDA process which another tool than gpucr has checkpointed since; one that is just starting CUDA: "
    "try again",
    code="GPUCR-GPU-HELD",
)
_LINKED = "a file whose name is gone, but which has another one"
LINKED_WRITTEN = Fact(
    what="{process} writes to " + _LINKED,
    consequence="what the restored job writes would go to a copy of it that has no name",
    remedy="let the process close it, or reopen it under its current name",
    code="GPUCR-LINKED-FILE",
)
LINKED_NOT_SAVED = Fact(
    what="{process} uses " + _LINKED,
    consequence="the snapshot would not have its content: it could be restored once, or after --leave-running never",
    remedy="restart the process (after an upgrade of its libraries, say), or remove the other hard links too "
    "(find / -samefile names them): what has no name at all goes into the snapshot",
    code="GPUCR-LINKED-FILE",
    case="in mounts of its own",
)
DELETED_TOO_LARGE = Fact(
    what="{process} has a deleted file of {size} in use",
    consequence="CRIU keeps deleted files of up to 4 GiB: a dump is refused",
    remedy="close the file, or give it a name",
    code="GPUCR-GHOST-TOO-LARGE",
)
_VERY_PID = "the restored process needs exactly that pid"
PID_TAKEN = Fact(
    what="pid {pid} is taken by {name}",
    consequence=_VERY_PID,
    remedy="end that process; if it is the job itself, it is still running and needs no restore",
    code="GPUCR-PID-IN-USE",
)
PID_OURS = Fact(
    what="pid {pid} is taken by {name}, which is gpucr itself or has started it",
    consequence=_VERY_PID,
    remedy="restore with --isolate: a sandbox has pids of its own; or start gpucr again, for another pid",
    code="GPUCR-PID-IN-USE",
    case="as in a container that has just started",
)
PID_OF_GROUP = Fact(
    what="pid {pid} is still the {use} of process {holder} ({name})",
    consequence=_VERY_PID,
    remedy="end process {holder}",
    code="GPUCR-PID-IN-USE",
)
PID_OF_SESSION = Fact(
    what=PID_OF_GROUP.what,
    consequence=_VERY_PID,
    remedy="end process {holder}, or restore with --isolate: a sandbox has pids of its own",
    code="GPUCR-PID-IN-USE",
    case="a session, for a job that had no terminal",
)
_COLLECT = (
    "let process {parent} collect (wait for) its child, or end that parent; if that is process 1 of a container, start "
    "the container with an init (docker run --init), or restore with --isolate: a sandbox has pids of its own"
)
PID_OF_ZOMBIE = Fact(
    what="pid {pid} is taken by the zombie of {name}",
    consequence=_VERY_PID,
    remedy=_COLLECT,
    code="GPUCR-PID-IN-USE",
)
GROUP_OF_ZOMBIE = Fact(
    what="pid {pid} is still the {use} of process {holder} (the zombie of {name})",
    consequence=_VERY_PID,
    remedy=_COLLECT,
    code="GPUCR-PID-IN-USE",
)
