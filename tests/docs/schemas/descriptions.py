"""What the fields of gpucr's own records mean, where commands print them as they are."""

from __future__ import annotations

from collections.abc import Mapping

from gpucr.borrow.listing import LentJob
from gpucr.checkups.repairs import Repair
from gpucr.cli import demo
from gpucr.criu.contents import SharedMemory
from gpucr.criu.imaged_files import OpenDescriptor
from gpucr.criu.imaged_memory import MemoryUse
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.jobs.environment import EnvironmentChange
from gpucr.model import Connection, Endpoint, ProcessId
from gpucr.on_demand.folder import OnDemandCounts
from gpucr.on_demand.listing import OnDemandJob
from gpucr.on_demand.start import OnDemandPlan
from gpucr.snapshot.destination import DumpCounts
from gpucr.snapshot.store_diff import Difference
from gpucr.undo.steps import Phase

OF_RECORDS: Mapping[type, Mapping[str, str]] = {
    Connection: {"local": "the job's end", "remote": "the other end"},
    DumpCounts: {
        "seen_bytes": "device memory and all files",
        "written_bytes": "what was written of it, as stored",
        "known_bytes": "what the store had before",
        "checked_bytes": "of the known: what was read",
        "repaired_bytes": "of the known: what was damaged",
        "compressed_saved_bytes": "what compression saved",
    },
    Difference: {
        "kind": "`device`, `memory` (host) or `file`",
        "name": "the process, or the file",
        "pid": "null: a file",
        "size_before_bytes": "null: that snapshot has no such thing",
        "size_after_bytes": "likewise",
        "changed_bytes": "of the pieces that differ",
        "ranges": "begin and end: addresses, of a file offsets",
    },
    Endpoint: {"address": "IPv4 or IPv6"},
    EnvironmentChange: {
        "value": "what gpucr recommends",
        "consequence": "of another value",
        "given": "your own value",
    },
    Finding: {
        "what": "one sentence",
        "evidence": "where it was seen",
        "consequence": "what follows, empty where it is `ok`",
        "remedy": "what to do, likewise",
        "pid": "null: the machine or the whole job",
        "code": "the [error](../../src/gpucr/error_codes.md) that a blocking one would be",
        "about": "the part that `doctor` has checked, else empty",
        "repair": "what `doctor --fix` does",
    },
    LentJob: {"snapshot": "null: it is in host memory", "state": "as in `jobs`"},
    MemoryUse: {
        "kind": "a [kind of memory](commands-snapshots.md#gpucr-inspect)",
        "mapped_bytes": "address space. Shared memory as often as it is mapped",
        "stored_bytes": "what the snapshot stores. Shared memory of the job once",
        "packed_bytes": "after compression",
    },
    OnDemandCounts: {
        "wakes": "how often it woke up, by result",
        "sleeps": "how often it fell asleep, by reason",
        "wake_buckets": "wakes of at most 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30 and 60 s",
        "wake_s": "what all wakes took",
        "waits": "requests that had to wait",
        "wait_s": "how long they all waited",
        "refused": "what was not served, by reason",
        "connection_count": "accepted ones",
        "moved_bytes": "`in` from clients, `out` to them",
    },
    OnDemandJob: {
        "forwarder": "the process that listens. Null: it is gone",
        "idle_s": "since the last byte",
        "waiting": "requests that wait for the job",
        "open_requests": "requests that it has",
        "open_connections": "connections of clients",
        "device_bytes": "what it needs",
        "counts": "what the forwarder has done",
    },
    OnDemandPlan: {
        "job_ports": "to which port of the job each leads",
        "where": "such as `awake`, `asleep`, `stored`",
        "device_bytes": "what it needs. Empty: not known yet",
        "most_connections": "at a time",
        "problems": "what stands against putting it to sleep",
    },
    OpenDescriptor: {
        "kind": "`file`, `pipe`, `fifo`, `tcp`, `udp`, `unix`, `memfd`, `epoll`, `eventfd`, `terminal`, …. "
        "`type-N` for an unknown one",
        "name": "a path, an address, or both ends of a connection",
    },
    Phase: {"size_bytes": "bytes moved"},
    demo.Phase: {"size_bytes": "bytes moved"},
    ProcessId: {"start_time_ticks": "clock ticks after boot, as in `/proc/PID/stat`"},
    Repair: {
        "what": "one sentence",
        "undo": "the command that undoes it",
        "problem": "why it was not done",
    },
    SharedMemory: {
        "image_id": "of its image, `pagemap-shmem-ID.img`",
        "name": "of its file in memory",
        "pids": "who maps it",
    },
}
