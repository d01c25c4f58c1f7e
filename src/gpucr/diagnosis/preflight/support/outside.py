"""What a job needs outside its processes: files, databases, ports and connections."""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact

_HAS = "the job has {connections} to programs outside it"
CONNECTIONS = Fact(
    what=_HAS,
    consequence="a restore closes them, and the job sees that as a network failure",
    remedy="let the program connect again when that happens",
    severity="warning",
    case="a dump that leaves the job running",
)
CONNECTIONS_END = Fact(
    what=_HAS,
    consequence="the dump ends them, and both ends see that as a network failure",
    remedy="--tcp keep holds them until a restore on this machine",
    severity="warning",
    case="a dump that ends the job",
)
CONNECTIONS_WAIT = Fact(
    what=_HAS,
    consequence="the other ends get no answer until a restore on this machine; many give up after some minutes",
    remedy="--tcp close",
    severity="warning",
    case="a dump with `--tcp keep`",
)
KEPT_ELSEWHERE = Fact(
    what="process {pid} is in another network namespace",
    consequence="its connections end with that namespace, and cannot be kept",
    remedy="dump with --tcp close, the default",
    code="GPUCR-CONNECTIONS",
    case="a dump with `--tcp keep`",
)
NO_FILTER = Fact(
    what="packets cannot be blocked on this machine",
    consequence="connections cannot be kept: the kernel would reset them",
    remedy="dump with --tcp close, the default; or modprobe nf_tables, or install iptables",
    code="GPUCR-CONNECTIONS",
    case="a dump with `--tcp keep`",
)
LINK_LOCAL = Fact(
    what="the job has {connections} over IPv6 link-local addresses",
    consequence="CRIU cannot bind them again",
    remedy="have the job use other addresses",
    code="GPUCR-CONNECTIONS",
    case="inside the job, or between its parts on several nodes",
)
_HAD = "the job had {connections} to programs outside it"
CONNECTIONS_CLOSED = Fact(
    what=_HAD + "; they are closed",
    consequence="the job sees a network failure",
    remedy="dump with --tcp keep, and restore on the same machine",
    severity="warning",
)
CONNECTIONS_KEPT = Fact(
    what=_HAD + "; they are taken up again",
    consequence="the other ends may be gone",
    remedy="--tcp close",
    severity="warning",
    case="dumped with `--tcp keep`",
)
CONNECTIONS_ENDED = Fact(
    what=_HAD + ", which the dump did not keep",
    consequence="the other ends have closed them, or would take the restored job's data for old data",
    remedy="restore with --tcp close; to keep them, dump with --tcp keep",
    code="GPUCR-CONNECTIONS",
    case="with `--tcp keep`",
)
CONNECTIONS_ABSENT = Fact(
    what=_HAD + ", and they are not kept on this machine",
    consequence="they were given up, or are kept on the machine of the dump",
    remedy="restore with --tcp close, or on the machine of the dump",
    code="GPUCR-CONNECTIONS",
    case="dumped with `--tcp keep`",
)
CONNECTIONS_APART = Fact(
    what=_HAD + ", and is restored into a network of its own",
    consequence="connections of the machine's network cannot be taken up there",
    remedy="restore with --tcp close, or without --isolate",
    code="GPUCR-CONNECTIONS",
    case="with `--tcp keep`",
)
PORT_IN_USE = Fact(
    what="{port} is in use",
    consequence="the job's socket cannot be bound there again",
    remedy="end that program; if it is the job itself, it is still running and needs no restore",
    code="GPUCR-ADDRESS-IN-USE",
)
CLONE_SOCKETS = Fact(
    what="the clone takes over the names of the job's local sockets",
    consequence="new connections to one of them reach the clone",
    remedy="let programs that are to be cloned use sockets of the network, or names of their own",
    severity="warning",
)

FILES_MISSING = Fact(
    what="{files} of the job are missing",
    consequence="the job had them open, and CRIU cannot restore it without them",
    remedy="put them where they were",
    code="GPUCR-FILE-MISSING",
)
_CHANGED = "{file} is {change} than at the dump"
_PUT_BACK = "put the file back as it was"
READ_ONLY_CHANGED = Fact(
    what=_CHANGED,
    consequence="the job only read it: it may be another file now, in which positions mean something else",
    remedy=_PUT_BACK + ", or use `--force` if data was only appended",
    code="GPUCR-FILE-CHANGED",
    case="the job only read it",
)
PROGRAM_CHANGED = Fact(
    what=_CHANGED,
    consequence=READ_ONLY_CHANGED.consequence,
    remedy=_PUT_BACK,
    code="GPUCR-FILE-CHANGED",
    case="the job had it mapped and only read it: programs, libraries",
)
MAPPED_SHORTER = Fact(
    what=_CHANGED,
    consequence="part of the job's memory is pages of it that are gone",
    remedy=_PUT_BACK,
    code="GPUCR-FILE-CHANGED",
    case="shorter; the job had it mapped and wrote to it",
)
KEPT_LONGER = Fact(
    what=_CHANGED,
    consequence="it stays unchanged, and the job appends to it",
    remedy="--files rewind cuts it back to what it was",
    severity="warning",
    case="longer; the job wrote to it",
)
KEPT_SHORTER = Fact(
    what=_CHANGED,
    consequence=KEPT_LONGER.consequence,
    remedy=_PUT_BACK,
    severity="warning",
    case="shorter; the job wrote to it",
)
CUT_BACK = Fact(
    what=_CHANGED,
    consequence="it is cut back, and the rest is kept beside it",
    remedy="--files keep",
    severity="warning",
    case="longer; the job wrote to it; with `--files rewind`",
)
REWIND_SHORTER = Fact(
    what=_CHANGED,
    consequence="what is missing cannot be brought back",
    remedy="restore with --files keep",
    code="GPUCR-FILE-CHANGED",
    case="shorter; the job wrote to it; with `--files rewind`",
)
REWIND_IN_USE = Fact(
    what="{file} is to be cut back and is in use",
    consequence="that program may be writing to it",
    remedy="end that program, or restore with --files keep",
    code="GPUCR-FILE-IN-USE",
)
MODE_CHANGED = Fact(
    what="{file} has another mode than at the dump",
    consequence="CRIU takes it for another file",
    remedy="give it back the mode that it had (chmod {then})",
    code="GPUCR-FILE-CHANGED",
)
OTHER_KIND = Fact(
    what="{file} is of another kind than at the dump",
    consequence="CRIU cannot open it in place of what was there",
    remedy=_PUT_BACK,
    code="GPUCR-FILE-CHANGED",
    case="a folder instead of a file",
)
NOT_OPENED = Fact(
    what="{file} cannot be opened for {use}",
    consequence="the job had it open so, and CRIU cannot restore it without",
    remedy="mount it so that it can be, let its owner change its mode, or restore as a user who may open it",
    code="GPUCR-NOT-PERMITTED",
)
NOTHING_MADE = Fact(
    what="no file can be made in {folder}",
    consequence="the job had a deleted file open there, which CRIU makes again for a moment",
    remedy="mount it so that files can be made, or restore as a user who may make some",
    code="GPUCR-NOT-PERMITTED",
)
LOCK_HELD = Fact(
    what="{holder} holds a lock on {file} that the job had",
    consequence="the restore would wait for it",
    remedy="end that program, or let it release the lock; if it is the job itself, it is still running and needs no "
    "restore",
    code="GPUCR-FILE-IN-USE",
)
SHARED_MEMORY_IN_USE = Fact(
    what="the shared memory file {file} is in use",
    consequence="the job needs that name, with the content at the dump",
    remedy="end that program; if it is the job itself, it is still running and needs no restore",
    code="GPUCR-FILE-IN-USE",
)
_OPEN = "the job has the SQLite database {file} open"
DATABASE = Fact(
    what=_OPEN,
    consequence="the job keeps changing it: a later restore finds it newer than the job's memory",
    remedy="--files rewind on the restore puts back the copy that the snapshot has, and keeps the newer one",
    severity="warning",
    case="a dump that leaves the job running",
)
DATABASE_ENDS = Fact(
    what=_OPEN,
    consequence="who opens it before the restore removes files of it that the job needs (-wal, -shm)",
    remedy="leave it alone until the restore; if it was opened, --files rewind puts back the copy that the snapshot "
    "has, and keeps the newer one",
    severity="warning",
    case="a dump that ends the job",
)
DATABASE_TOO_LARGE = Fact(
    what=_OPEN + ", too large at {size} for a copy in the snapshot",
    consequence="a later restore may find it newer, or without files that the job needs (-wal, -shm), and is then "
    "impossible",
    remedy="copy all its files together (FILE, FILE-wal, FILE-shm) before anybody opens it",
    severity="warning",
    case="all databases have more than 1 GiB",
)
DATABASE_CHANGED = Fact(
    what="the SQLite database {file} was changed after the dump",
    consequence="it stays unchanged, and to the job new rows look like another program's work",
    remedy="to have it as it was, put back a copy of all its files from the time of the dump",
    severity="warning",
)
DATABASE_NEWER = Fact(
    what=DATABASE_CHANGED.what,
    consequence=DATABASE_CHANGED.consequence,
    remedy="--files rewind puts back the copy that the snapshot has, and keeps the newer one",
    severity="warning",
    case="the snapshot has a copy",
)
DATABASE_PUT_BACK = Fact(
    what=DATABASE_CHANGED.what,
    consequence="the snapshot's copy replaces it, and the newer files are kept beside",
    remedy="--files keep",
    severity="warning",
    case="the snapshot has a copy; with `--files rewind`",
)
DATABASE_MISSING = Fact(
    what="files of the SQLite database {file} are missing",
    consequence="the job had them open; somebody has opened the database since the dump, and SQLite has removed them",
    remedy="--files rewind puts back the copy that the snapshot has, of all files together, and keeps the newer one",
    code="GPUCR-DATABASE",
    case="the snapshot has a copy",
)
DATABASE_REWIND = Fact(
    what=DATABASE_CHANGED.what,
    consequence="its pages are changed in place, so cutting its files back would only damage it",
    remedy="restore with --files keep, or put back a copy of all its files from the time of the dump (--force rewinds "
    "the other files, and leaves the database as it is)",
    code="GPUCR-DATABASE",
    case="without a copy; with `--files rewind`",
)
