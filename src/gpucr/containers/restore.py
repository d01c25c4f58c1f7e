"""The GPU part of a restore by a container runtime.

CRIU makes the processes and resumes them; those with CUDA are still stopped then, as they were dumped. So device memory
comes back in CRIU's last hook, post-resume. Everything that can be refused is refused in the first one, pre-restore,
while there is nothing to undo.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from gpucr.diagnosis import preflight
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import list_gpus
from gpucr.errors import ProcessNotFound, SnapshotDamaged
from gpucr.gang import Gang
from gpucr.gang.threads import GangThreads
from gpucr.gpu_state import kinds
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.interposed.hooks import call
from gpucr.gpu_state.placement import Placement
from gpucr.gpu_state.returns import Returns
from gpucr.gpu_state.steps import HoldThreads, ReleaseThreads, RestoreGang, UnlockGang
from gpucr.interposer.presence import agent_threads
from gpucr.interposer.protocol import Hooks
from gpucr.linux import processes, tcp_repair
from gpucr.model import CudaState
from gpucr.operations.restore_device import RestoreDevice
from gpucr.operations.restored_tree import RestoredTree, end_restored, restore_threads, take_stock
from gpucr.snapshot.folder import GPU_PART_NAME, Snapshot
from gpucr.snapshot.gpus import place_snapshot
from gpucr.snapshot.loading import LoadDevice
from gpucr.snapshot.machine import findings_of_processor, findings_of_room
from gpucr.snapshot.manifest import Manifest
from gpucr.snapshot.origin import FolderSource
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.operation import TO_MOVE, operation
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter, Result, Step, WithoutUndo


def has_gpu_part(images: Path) -> bool:
    """Whether these images are from a container that used CUDA."""
    return (images / GPU_PART_NAME).exists()


def check_gpu_part(images: Path) -> list[preflight.Finding]:
    """Check whether this machine can restore the GPU part of these images. Changes nothing.

    Returns non-blocking findings. Raises SnapshotUnfinished, SnapshotDamaged, SnapshotError, Unsupported,
    DriverUnavailable.
    """
    _, _, _, findings = _examine(images)
    preflight.require_no_blocking(findings, force=None)
    return findings


def restore_for_runtime(root_pid: int, images: Path) -> None:
    """Bring back the GPU state of the tree of ``root_pid``, which a runtime's CRIU has just restored and resumed.

    The CUDA processes are CHECKPOINTED and stopped; they end up in the state in which the dump found them, and run. Any
    failure ends every process of the tree. Needs root. Raises as `gpucr.restore` does.
    """
    try:
        with operation("restore", root_pid) as running, Protection() as protection:
            snapshot, driver, placement, _ = _examine(images)
            known = snapshot.manifest.processes
            running.require_descriptors(len(known), sum(p.found_state is not None for p in known), TO_MOVE)
            gang = Gang(driver, ())
            load = LoadDevice(FolderSource(snapshot), Returns(gang, placement))
            try:
                adopt = AdoptTree(root_pid, snapshot.manifest, gang, protection)
                running.works_on(None, protection)
                running.run(_steps(adopt, snapshot, load, gang, placement, protection))
            finally:
                load.close()
    except BaseException:
        with contextlib.suppress(ProcessNotFound):  # the steps' own undo has ended it
            processes.kill_tree(root_pid, including_root=True)
        raise
    told = (each for each in known if each.has_hooks and each.found_state is CudaState.RUNNING)
    call(Hooks.AFTER_RESTORE, adopt.tree.value.now(told))


def _examine(images: Path) -> tuple[Snapshot, Driver, Placement, list[preflight.Finding]]:
    snapshot = Snapshot.open(images / GPU_PART_NAME)
    manifest = snapshot.manifest
    if not manifest.has_gpu_state:
        raise SnapshotDamaged(f"{snapshot.path} is a GPU part without GPU state", path=str(snapshot.path))
    kinds.require_kinds(manifest.kinds, snapshot.where)
    driver = load_driver()
    here = list_gpus()
    placement = place_snapshot(manifest, GpuRequest.of(None, None), here, ())
    # CRIU has already made the processes' private memory.
    findings = findings_of_room(
        manifest, placement.choice, here, private_bytes=0, buffers_bytes=FolderSource(snapshot).buffers_bytes
    )
    findings += findings_of_processor(manifest.architecture, manifest.processor)
    return snapshot, driver, placement, findings


def _steps(
    adopt: AdoptTree, snapshot: Snapshot, load: LoadDevice, gang: Gang, placement: Placement, protection: Protection
) -> list[Step]:
    threads = GangThreads(agent_threads)
    tree = adopt.tree
    restore_gang = RestoreGang(gang, placement, down_to=lambda member: member.found)
    return [
        adopt,
        load,
        HoldThreads(threads, lambda: restore_threads(snapshot, tree.value)),
        RestoreDevice(snapshot, load.loading, tree, restore_gang, placement, None),
        WithoutUndo(UnlockGang(gang, down_to=lambda member: member.found)),
        ReleaseThreads(threads, protection, is_result=True),
    ]


class AdoptTree:
    """Find the restored processes; from then on a failure ends them."""

    name = "adopt"

    def __init__(self, root_pid: int, manifest: Manifest, gang: Gang, protection: Protection) -> None:
        self._root_pid = root_pid
        self._manifest = manifest
        self._gang = gang
        self._protection = protection
        self.tree: Result[RestoredTree] = Result()

    def describe(self) -> str:
        return f"find the container's processes below {self._root_pid}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self.tree.set(take_stock([self._root_pid], self._manifest, self._gang, self._protection))
        with contextlib.suppress(OSError):
            tcp_repair.use_full_segments(self.tree.value.processes)
        return 0

    def undo(self) -> None:
        """End every process of the tree."""
        end_restored([self._root_pid], self.tree.if_known)
