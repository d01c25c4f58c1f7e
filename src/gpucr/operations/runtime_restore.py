"""The GPU's part of a restore that a container runtime has begun.

CRIU makes the processes and lets them go on; those with CUDA are still stopped then, as they were dumped. So device
memory comes back in CRIU's last hook, post-resume. What can be refused is refused in its first one, pre-restore, while
there is nothing to undo.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from gpucr import preflight
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import list_gpus
from gpucr.errors import ProcessNotFound, SnapshotDamaged
from gpucr.gang import Gang
from gpucr.linux import processes
from gpucr.operations.freeze import HoldThreads, ReleaseThreads, RestoreGang, UnlockGang
from gpucr.operations.gpu_choice import GpuRequest
from gpucr.operations.gpu_places import Placement, place_snapshot
from gpucr.operations.interrupts import Interrupts
from gpucr.operations.operation import TO_MOVE, operation
from gpucr.operations.protection import Protection
from gpucr.operations.restore_steps import DeviceRestore, LoadDevice, RestoreDevice, end_restored, take_stock
from gpucr.operations.sources import FolderSource, device_bytes_of
from gpucr.operations.steps import Meter, Step, WithoutUndo
from gpucr.operations.threads import GangThreads
from gpucr.operations.traps import findings_of_targets
from gpucr.snapshot.folder import GPU_PART_NAME, Snapshot


def has_gpu_part(images: Path) -> bool:
    """Whether these images are of a container that used CUDA."""
    return (images / GPU_PART_NAME).exists()


def check_gpu_part(images: Path) -> list[preflight.Finding]:
    """Whether the GPU part of these images can come back on this machine. Changes nothing.

    Returns what did not stop it. Raises SnapshotUnfinished, SnapshotDamaged, SnapshotError, Unsupported,
    DriverUnavailable.
    """
    _, _, _, findings = _examine(images)
    preflight.require_no_blocking(findings, force=False)
    return findings


def restore_for_runtime(root_pid: int, images: Path) -> None:
    """Bring back the GPU state of the tree of ``root_pid``, which a runtime's CRIU has just restored and lets run.

    The CUDA processes are CHECKPOINTED and stopped; they end in the state in which the dump had found them, and run.
    Whatever fails ends every process of the tree. Needs root. Raises as `gpucr.restore` does.
    """
    try:
        with operation() as running, Protection() as protection:
            snapshot, driver, placement, _ = _examine(images)
            known = snapshot.manifest.processes
            running.require_descriptors(len(known), sum(p.found_state is not None for p in known), TO_MOVE)
            context = DeviceRestore(
                source=FolderSource(snapshot), deadline=None, protection=protection, root_pid=root_pid
            )
            try:
                running.run(_steps(context, driver, placement, protection), protection=protection)
            finally:
                context.close()
    except BaseException:
        with contextlib.suppress(ProcessNotFound):  # the steps' own undo has ended it
            processes.kill_tree(root_pid, including_root=True)
        raise


def _examine(images: Path) -> tuple[Snapshot, Driver, Placement, list[preflight.Finding]]:
    snapshot = Snapshot.open(images / GPU_PART_NAME)
    manifest = snapshot.manifest
    if not manifest.has_gpu_state:
        raise SnapshotDamaged(f"{snapshot.path} is a GPU part without GPU state", path=str(snapshot.path))
    driver = load_driver()
    here = list_gpus()
    placement = place_snapshot(manifest, GpuRequest.of(None, None), here, ())
    choice = placement.choice
    # The private memory of the processes is there already: CRIU has made them.
    needs = preflight.needs_of_restore(
        device_bytes_of(manifest),
        processes=len(manifest.processes),
        buffers_bytes=FolderSource(snapshot).buffers_bytes,
    )
    findings = [
        *preflight.check_host_memory(needs),
        *preflight.check_gpus(choice.had, choice.needed_bytes, here, choice.gpu_map),
        *findings_of_targets(choice.needed_bytes or [gpu.uuid for gpu in choice.had], here, choice.gpu_map),
    ]
    return snapshot, driver, placement, findings


def _steps(context: DeviceRestore, driver: Driver, placement: Placement, protection: Protection) -> list[Step]:
    gang = context.gang = Gang(driver, ())
    threads = GangThreads()
    placement.restored_as(context.pids)
    return [
        AdoptTree(context),
        LoadDevice(context),
        HoldThreads(threads, context.restore_threads),
        RestoreDevice(context, RestoreGang(gang, placement, down_to=lambda member: member.found)),
        WithoutUndo(UnlockGang(gang, down_to=lambda member: member.found)),
        ReleaseThreads(threads, protection, is_result=True),
    ]


class AdoptTree:
    """Find the restored processes; from then on a failure ends them."""

    name = "adopt"

    def __init__(self, context: DeviceRestore) -> None:
        self._context = context

    def describe(self) -> str:
        """Whose tree."""
        return f"find the container's processes below {self._context.root_pid}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Find them."""
        take_stock(self._context)
        return 0

    def undo(self) -> None:
        """End every process of the tree."""
        end_restored(self._context)
