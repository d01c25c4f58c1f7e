"""Whether this machine can take a snapshot: free pids, memory, GPUs, capabilities, of the same kind."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Collection, Sequence
from pathlib import Path, PurePath, PurePosixPath

from gpucr.criu.credentials import credentials_in
from gpucr.criu.image_entries import ImageError
from gpucr.criu.images import have_clocks
from gpucr.criu.install import CriuInstall
from gpucr.criu.pids import pids_in
from gpucr.criu.reopened import Reopened, reopened
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight.support import gpu_use, machine
from gpucr.diagnosis.traps import findings_of_targets
from gpucr.errors import BrokenInstall
from gpucr.gpu_state.backend import CUSTOM_STORAGE, INTERPOSED
from gpucr.gpu_state.gpu_choice import GpuChoice
from gpucr.interposer.build import LIBRARY
from gpucr.interposer.library import put_back
from gpucr.linux import capabilities, processor
from gpucr.linux.namespaces import keep_clear_of
from gpucr.linux.pid_uses import wait_for_reaping
from gpucr.linux.processor import Processor
from gpucr.model import Gpu
from gpucr.snapshot.manifest import Manifest
from gpucr.snapshot.origin import RestoreSource, device_bytes_of, private_bytes_of

REAPING_TIMEOUT_S = 10.0
"""How long a restore waits for the dumped processes' parents to reap their zombies."""


def findings_of_machine(
    source: RestoreSource, choice: GpuChoice, here: Sequence[Gpu], install: CriuInstall, *, in_sandbox: bool
) -> list[preflight.Finding]:
    """Findings about this machine against a restore. ``here``: its GPUs.

    Waits for parents to reap zombies, keeps later processes of gpucr's off the job's pids, and installs the
    interposer's library where the job had it, if it is gpucr's own.
    """
    manifest = source.snapshot.manifest
    libraries = [path for file in manifest.open_files if (path := PurePosixPath(file.path)).name == LIBRARY]
    for each in libraries:
        with contextlib.suppress(BrokenInstall):  # that it is missing is found below
            put_back(each)
    pids = _pids_needed_here(source) if not in_sandbox else set()
    keep_clear_of(pids)
    findings = [] if in_sandbox else preflight.check_root()
    findings += preflight.check_free_pids(wait_for_reaping(pids, REAPING_TIMEOUT_S))
    paths = [file.path.rpartition("/")[::2] for file in manifest.files]
    findings += preflight.check_clocks(are_in_images=have_clocks(name for _, name in paths))
    wanted, uids = 0, set[int]()
    with contextlib.suppress(OSError, ImageError):  # a damaged image is an error of its own, when it is provided
        for folder, open_image in zip(manifest.image_folders, source.openers, strict=True):
            names = [name for above, name in paths if above.rpartition("/")[2] == folder]
            capabilities_of_tree, uids_of_tree = credentials_in(names, open_image)
            wanted |= capabilities_of_tree
            uids |= uids_of_tree
        findings += preflight.check_capabilities(wanted, capabilities.own().after_exec())
    findings += preflight.check_restore_by_user(install, uids)
    findings += preflight.check_users({each.uid: each.name for each in manifest.users})
    findings += findings_of_room(
        manifest, choice, here, private_bytes=private_bytes_of(manifest), buffers_bytes=source.buffers_bytes
    )
    findings += _check_interposer(manifest, libraries)
    return findings + findings_of_processor(manifest.architecture, manifest.processor)


def findings_of_processor(architecture: str, dumped: Processor) -> list[preflight.Finding]:
    """Whether programs that were dumped on such a processor can run on this machine's."""
    here = platform.machine()
    if architecture != here:
        return [machine.ARCHITECTURE.seen(f"this one is {here}", architecture=architecture)]
    return preflight.check_processor(dumped, processor.here())


def files_to_open(source: RestoreSource, *, apart_from: Collection[str]) -> tuple[list[Reopened], list[str]]:
    """The files and folders that CRIU opens again, and the folders in which it makes deleted ones."""
    files: list[Reopened] = []
    folders: list[str] = []
    with contextlib.suppress(OSError, ImageError):  # a damaged image is an error of its own, when it is provided
        for open_image in source.openers:
            opened, made = reopened(open_image)
            files += [each for each in opened if each.path not in apart_from]
            folders += made
    return files, folders


def _check_interposer(manifest: Manifest, libraries: Sequence[PurePath]) -> list[preflight.Finding]:
    """Memory taken by an interposer only comes back through it, and the processes have it mapped from its old path."""
    if INTERPOSED not in manifest.kinds.values():
        return []
    return [
        gpu_use.INTERPOSER_MISSING.seen(
            "the snapshot's kinds of device memory; the job had that file mapped", path=path
        )
        for path in libraries
        if not Path(path).exists()
    ]


def findings_of_room(
    manifest: Manifest, choice: GpuChoice, here: Sequence[Gpu], *, private_bytes: int, buffers_bytes: int
) -> list[preflight.Finding]:
    """Whether it fits into host memory and these GPUs. ``private_bytes``: private memory that CRIU restores."""
    findings = preflight.check_host_memory(
        preflight.needs_of_restore(
            device_bytes_of(manifest),
            processes=len(manifest.processes),
            private_bytes=private_bytes,
            buffers_bytes=buffers_bytes,
            vaults=len(_gpus_filled_by_us(manifest)),
        )
    )
    if manifest.has_gpu_state:
        # gpucr's own context takes no more than one of the job's, and ends before the driver makes those.
        findings += preflight.check_gpus(choice.had, choice.needed_bytes, here, choice.gpu_map)
        targets = choice.needed_bytes or [gpu.uuid for gpu in choice.had]
        findings += findings_of_targets(targets, here, choice.gpu_map)
    return findings


def _gpus_filled_by_us(manifest: Manifest) -> set[str]:
    """The UUIDs of the GPUs to which gpucr itself copies what the snapshot has."""
    return {
        extent.gpu
        for part, data in manifest.device_parts.items()
        if data.kind in (INTERPOSED, CUSTOM_STORAGE) and part.pid not in manifest.suspended_pids
        for extent in data.extents
        if extent.gpu is not None
    }


def _pids_needed_here(source: RestoreSource) -> set[int]:
    """None for a job with its own pid namespace."""
    known = source.snapshot.manifest.processes
    if any(len(process.ns_pids) > 1 for process in known):
        return set()
    pids = {tid for process in known for tid in (process.pid, *process.threads)}
    with contextlib.suppress(OSError, ImageError):  # a damaged image is an error of its own, when it is provided
        for open_image in source.openers:
            pids.update(pids_in(open_image))
    return pids
