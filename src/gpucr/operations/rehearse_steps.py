"""The steps that only a rehearsal has, and what its sandbox sees of the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from gpucr.criu.contents import read_contents
from gpucr.criu.images import FilesImage
from gpucr.criu.install import CriuInstall
from gpucr.criu.reopened import reopened
from gpucr.errors import JobChanged, SnapshotDamaged
from gpucr.gang.threads import STOP_TIMEOUT_S
from gpucr.linux import processes
from gpucr.linux.private_view import Folder, View
from gpucr.operations.restored_tree import RestoredTree
from gpucr.quantities import counted, format_bytes
from gpucr.snapshot.device.reader import Piece
from gpucr.snapshot.manifest import ProcessRecord
from gpucr.snapshot.origin import RestoreSource, images_read_from
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter, Result, Step

_STOPPED = "Tt"  # by a signal, by its tracer (proc_pid_stat(5))


def view_for(source: RestoreSource, install: CriuInstall) -> View:
    """What CRIU may change in the view when it restores these images. Raises SnapshotDamaged."""
    manifest = source.snapshot.manifest
    paths = {folder.path for folder in manifest.folders}
    written: set[str] = set()
    as_is = {word for word in install.command if word.startswith("/")}
    for folder, open_image in zip(source.image_folders, source.openers, strict=True):
        with images_read_from(folder):
            image = FilesImage.read(folder)
            opened, made = reopened(open_image)
        sockets = image.named_sockets()
        paths |= {*image.paths().values(), *made, *sockets.own}
        written |= {each.path for each in opened if each.is_written}
        as_is |= {path for path in sockets.outside if os.path.exists(path)}
    folders = [Folder(each.path, each.mode, each.uid, each.gid) for each in manifest.folders]
    absolute = sorted(path for path in paths if os.path.isabs(path))
    return View(absolute, sorted(filter(os.path.isabs, written)), folders, sorted(as_is))


class CheckDevice:
    """Read device memory and check its digests, where the GPUs have no room for it."""

    name = "read"

    def __init__(self, source: RestoreSource) -> None:
        self._source = source

    def describe(self) -> str:
        return f"check the digests of {format_bytes(self._stored_bytes())} of device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Read all of it. Returns its bytes. Raises SnapshotDamaged, StoreDamaged."""
        pieces = self._source.pieces()
        try:
            parts = self._source.snapshot.manifest.device_parts
            every = [Piece(part, number) for part in parts for number in range(len(pieces.starts(part)) - 1)]
            stored = [piece for piece in every if not pieces.is_zero(piece)]
            meter.expect(self._stored_bytes())

            def deliver(number: int, data: bytes | bytearray | memoryview | None) -> None:
                interrupts.check()
                meter.add(len(data) if data is not None else 0)

            with interrupts.allowed():
                pieces.stream(stored, deliver)
        finally:
            pieces.close()
        return self._stored_bytes()

    def undo(self) -> None:
        pass

    def _stored_bytes(self) -> int:
        return sum(each.stored_bytes for each in self._source.snapshot.manifest.device_parts.values())


class CheckRestored:
    """Compare the restored processes with those of the manifest and of the images."""

    name = "compare"

    def __init__(self, source: RestoreSource, tree: Result[RestoredTree]) -> None:
        self._source = source
        self._snapshot = source.snapshot
        self._tree = tree

    def describe(self) -> str:
        count = counted(len(self._snapshot.manifest.processes), "process")
        return f"compare {count} with the snapshot: parents, threads, names, arguments, descriptors"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Raises JobChanged if one is missing, is another than the snapshot says, or runs; SnapshotDamaged."""
        pids = self._tree.value.pids
        processes.wait_for_stop(pids.values(), STOP_TIMEOUT_S)  # on a busy machine a SIGSTOP of CRIU's is still pending
        descriptors = self._descriptors()
        for record in self._snapshot.manifest.processes:
            pid = pids.get(record.pid)
            stat = processes.read_stat(pid) if pid is not None else None
            if pid is None or stat is None or stat.status in "ZX":
                raise _other(record, "it is missing")
            wrong = self._differences(record, pid)
            missing = descriptors.get(record.ns_pids[-1], frozenset()) - _open(pid)
            wrong += [f"its descriptor {min(missing)} is missing"] if missing else []
            if stat.status not in _STOPPED:
                wrong.append(f"it is not stopped but in state {stat.status}")
            if wrong:
                raise _other(record, "; ".join(wrong))
        return 0

    def undo(self) -> None:
        pass

    def _descriptors(self) -> dict[int, frozenset[int]]:
        """The numbers of each process's descriptors, by its innermost pid. CRIU takes no image for an empty one."""
        found: dict[int, frozenset[int]] = {}
        for open_image in self._source.openers:
            contents = read_contents(open_image)
            if contents.problems:
                raise SnapshotDamaged(
                    f"CRIU's images do not fit together: {contents.problems[0]}",
                    path=self._snapshot.where,
                    hint="this snapshot cannot be restored: use another",
                )
            found |= {each.pid: frozenset(d.fd for d in each.descriptors) for each in contents.processes}
        return found

    def _differences(self, record: ProcessRecord, pid: int) -> list[str]:
        now, pids = processes.describe(pid), self._tree.value.pids
        threads = len(processes.threads(pid))
        wrong = []
        if threads != len(record.threads):
            wrong.append(f"it has {counted(threads, 'thread')}, and had {len(record.threads)}")
        if now.name != record.name:
            wrong.append(f"its name is {now.name!r}")
        if now.command_line != record.command_line:
            wrong.append("its arguments are others")
        if record.parent_pid in pids and now.parent_pid != pids[record.parent_pid]:
            wrong.append("its parent is another one")
        return wrong


class EndRehearsal:
    """End the sandbox, and with it all that was restored. Nothing of it runs in between."""

    name = "end"

    def __init__(self, steps: Sequence[Step]) -> None:
        """``steps``: those in the sandbox; the first one made it."""
        self._steps = steps

    def describe(self) -> str:
        return "end the restored processes and their sandbox"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Kill them. Raises JobDamaged if one does not end."""
        for step in reversed(self._steps):
            step.undo()
        return 0

    def undo(self) -> None:
        """What the others' undo does."""


def _open(pid: int) -> frozenset[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return frozenset(map(int, os.listdir(f"{processes.PROC}/{pid}/fd")))
    return frozenset()


def _other(record: ProcessRecord, how: str) -> JobChanged:
    return JobChanged(
        f"process {record.pid} ({record.name}) is not as it was dumped: {how}",
        pids=[record.pid],
        hint="do not rely on this snapshot: dump the job again, and rehearse that",
    )
