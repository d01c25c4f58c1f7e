"""What commands about snapshots, stores and the machine print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from gpucr.checkups.repairs import Repair
from gpucr.cli import demo
from gpucr.criu.contents import SharedMemory
from gpucr.criu.imaged_files import OpenDescriptor
from gpucr.criu.imaged_memory import MemoryUse
from gpucr.criu.install import Origin
from gpucr.diagnosis.canaries.results import CanaryOutcome
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux.unit_files import What
from gpucr.model import Connection
from gpucr.snapshot.store_diff import Difference
from gpucr.store.stored_snapshot import SetPart
from tests.docs.schemas.base import Object, says
from tests.docs.schemas.operations import Rehearsal


class DeviceMemory(Object):
    pid: int
    kind: Annotated[str, says("the backend that held it: `captured`, `plain` (CRIU wrote it), or one over these")]
    place: Annotated[Literal["device", "store", "images"], says("the folder, the store, or CRIU's images")]
    size_bytes: Annotated[int | None, says("what the driver left. Null: it had been suspended before")]
    stored_bytes: Annotated[int | None, says("null in CRIU's images")]
    zero_bytes: Annotated[int | None, says("likewise")]
    extents: Annotated[int, says("how many ranges of the address space it was in")]


class ProcessContents(Object):
    pid: Annotated[int, says("as in the manifest")]
    memory: list[MemoryUse]
    descriptors: list[OpenDescriptor]


class Contents(Object):
    processes: Annotated[list[ProcessContents], says("the root first")]
    memory: Annotated[list[MemoryUse], says("of the whole job")]
    shared_memory: list[SharedMemory]
    packed_bytes: Annotated[int | None, says("after compression. Null: not compressed, as in every folder")]
    problems: Annotated[list[str], says("images that could not be read, and why")]


class Inspect(Object):
    snapshot: str
    size_bytes: Annotated[int, says("without zeros of device memory")]
    has_gpu_state: bool
    verified: Annotated[bool, says("whether all data was read and checked")]
    device_memory: Annotated[list[DeviceMemory], says("by process, usually one part each")]
    contents: Annotated[Contents, says("what CRIU's images hold, and device memory")]
    manifest: Annotated[dict[str, Any], says("as in the [snapshot format](snapshot-format.md#the-manifest)")]


class KeptConnections(Object):
    name: Annotated[str, says("of the record")]
    snapshot: Annotated[str, says("their owner")]
    created: str
    connections: list[Connection]


class Connections(Object):
    closed: Annotated[bool, says("whether they were given up")]
    kept: list[KeptConnections]


class Verify(Object):
    checked: Annotated[list[str], says("ids. Of a plain snapshot its path")]
    deep: Annotated[bool, says("whether all data was read")]
    pieces: Annotated[int | None, says("how many different ones. Null: a plain snapshot")]
    packs: Annotated[int | None, says("likewise: those that they are in")]
    read_bytes: int
    damaged: Annotated[dict[str, list[str]], says("what is wrong, by snapshot, or object that no snapshot needs")]


class VerifyRehearsal(Rehearsal):
    snapshot: str


class StoreInit(Object):
    store: Annotated[str, says("its place")]
    id: str
    encrypted: bool
    hash: Annotated[Literal["blake3", "sha256"], says("the second where the first is not installed")]
    piece_bytes: int
    pack_bytes: int
    shared_with_group: str | None


class Key(Object):
    id: str
    kind: Literal["passphrase", "key file", "damaged"]


class StoreKeys(Object):
    keys: list[Key]


class Snapshot(Object):
    id: str
    name: str | None
    created: str
    host: str
    size_bytes: int
    job: Annotated[str | None, says("the job's name, if `gpucr run` had started it")]
    command_line: list[str]
    gpu_models: list[str]
    counters: Annotated[dict[str, int], says("what the dump counted, as in `dump`")]
    part: Annotated[SetPart | None, says("null: it stands for itself")]
    complete: Annotated[bool, says("false: its set is not complete")]


class Ls(Object):
    snapshots: Annotated[list[Snapshot], says("the oldest first")]
    damaged: dict[str, list[str]]


class Rm(Object):
    removed: list[Snapshot]


class LaterSpace(Object):
    size_bytes: int
    after: Annotated[
        str | None,
        says(
            "a prune after this time, by the clock of the store, deletes them. "
            "Null: a snapshot needs something in them that is intact nowhere else"
        ),
    ]
    writers: Annotated[int, says("dumps, copies and prunes at work now that must have ended by then")]


class Prune(Object):
    dry_run: bool
    kept: list[Snapshot]
    removed: list[Snapshot]
    later: Annotated[list[LaterSpace], says("when the retired packs can be deleted")]
    dead_writers: Annotated[list[str], says("ids of dumps that died")]
    retired_packs: Annotated[int, says("found by this prune. A later one deletes them")]
    retired_bytes: int
    waiting_packs: Annotated[int, says("retired before, and must still wait")]
    waiting_bytes: int
    deleted_packs: Annotated[int, says("space that is free now")]
    deleted_bytes: int
    repacked_bytes: int


class Copied(Object):
    source: Annotated[Snapshot, says("in the first store")]
    target: Annotated[Snapshot, says("in the second")]


class Copy(Object):
    copies: list[Copied]


class Diff(Object):
    differences: list[Difference]


class Criu(Object):
    path: str
    command_line: Annotated[list[str], says("how it is started: a fetched one through its own loader")]
    version: str
    origin: Origin
    works: Annotated[bool, says("whether `criu check` succeeds here")]
    problem: str | None


class Canary(Object):
    name: str
    outcome: CanaryOutcome
    detail: str
    action: Annotated[str | None, says("what the driver was doing")]
    result: Annotated[int | None, says("the CUresult that it gave")]
    state: Annotated[str | None, says("afterwards")]
    seconds: float
    measured: Annotated[str, says("when")]


class Probe(Object):
    driver_version: str
    kernel: str
    gpu_names: list[str]
    path: Annotated[str | None, says("the file of the results")]
    problem: Annotated[str | None, says("why they could not be kept")]
    canaries: list[Canary]


class Doctor(Object):
    blocked: Annotated[bool, says("whether a finding is `blocking`")]
    checkups: Annotated[list[Finding], says("in the order of the table")]
    repairs: Annotated[list[Repair], says("what `--fix` did or could not do")]
    probe: Annotated[Probe | None, says("null: nothing was measured on this machine, or it is about a job")]


class DemoPhase(demo.Phase, frozen=True):
    pass


class Demo(Object):
    driver: Literal["nvidia", "simulated"]
    ok: bool
    checks: list[demo.Check]
    phases: Annotated[list[DemoPhase], says("of the dump and the restore")]


class FileChange(Object):
    path: str
    what: What


class Changes(Object):
    changes: list[FileChange]


class HelperStatus(Object):
    socket: Annotated[str | None, says("where it listens. Null: there is none for this user")]
    criu_version: Annotated[str | None, says("of the CRIU that it starts")]


class HookStatus(Object):
    installed: Annotated[bool, says("whether some CRIU calls this gpucr")]
    script: str
    current: Annotated[bool, says("whether the script starts this gpucr")]
    configured: Annotated[list[str], says("the files that name it")]


class ServiceShow(Object):
    units: Annotated[dict[str, str], says("by name")]


class SimEnv(Object):
    variables: dict[str, str]


class Explanation(Object):
    code: str
    text: Annotated[str, says("in Markdown")]


class Explain(Object):
    codes: list[Explanation]


_INSTALLED = ("service", "helper", "hook")

OUTPUTS: Mapping[str, tuple[type, ...]] = {
    "inspect": (Inspect,),
    "connections": (Connections,),
    "verify": (Verify,),
    "verify.rehearsal": (VerifyRehearsal,),
    "store.init": (StoreInit,),
    "store.keys": (StoreKeys,),
    "ls": (Ls,),
    "rm": (Rm,),
    "prune": (Prune,),
    "copy": (Copy,),
    "diff": (Diff,),
    "criu": (Criu,),
    "doctor": (Doctor,),
    "demo": (Demo,),
    **{f"{each}.{action}": (Changes,) for each in _INSTALLED for action in ("install", "uninstall")},
    "helper.status": (HelperStatus,),
    "hook.status": (HookStatus,),
    "service.show": (ServiceShow,),
    "sim.env": (SimEnv,),
    "explain": (Explain,),
}
