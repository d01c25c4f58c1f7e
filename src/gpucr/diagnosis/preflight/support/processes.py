"""A job's processes, their descriptors and their pids."""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.linux.inherited import UNDUMPABLE_KINDS

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
    kinds=("pipes", "sockets", "memory and files without a name"),
)
TERMINAL = Fact(
    what="{process} has a controlling terminal",
    consequence="it is stopped for the dump; an interactive shell then moves it to the background, where it continues",
    remedy="`fg` in that shell brings it back; jobs started with setsid have no terminal",
    severity="warning",
)
IO_URING = Fact(
    what="{process} has an io_uring ring",
    consequence="CRIU cannot dump one",
    remedy="start the job without io_uring; for torch's TCPStore set USE_LIBUV=0",
    code="GPUCR-IO-URING",
)
UNDUMPABLE = Fact(
    what="{process} has a descriptor that CRIU cannot dump",
    consequence="the dump would fail",
    remedy="close it, or dump without the part of the program that needs it; one that is just starting CUDA: try again",
    code="GPUCR-UNSUPPORTED-FILE",
    case="without CUDA; else CRIU decides",
    kinds=UNDUMPABLE_KINDS,
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
