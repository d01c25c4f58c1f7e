"""The steps of a restore that prepare the job's surroundings for CRIU."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from gpucr.criu.images import FilesImage, RestoreImages, images_to_be_changed
from gpucr.diagnosis.preflight.databases import spared_by_rewind
from gpucr.diagnosis.preflight.surroundings import FilesMode, TcpMode
from gpucr.errors import DeadlineExceeded, Unsupported
from gpucr.linux import cut_back, sock_diag
from gpucr.linux.cut_back import CutOff
from gpucr.model import Connection, Endpoint, JobFile, moved
from gpucr.network.between import Between
from gpucr.network.held_back import HoldBack
from gpucr.network.records import KeptRecord
from gpucr.quantities import counted, format_bytes
from gpucr.snapshot.databases import state_now
from gpucr.snapshot.manifest import Manifest
from gpucr.snapshot.origin import RestoreSource, images_read_from
from gpucr.snapshot.shared_files import SharedFiles
from gpucr.surroundings.databases import PutBackDatabases
from gpucr.surroundings.recovery import PutBackCuts, RemoveSharedFiles, can_be_told
from gpucr.surroundings.site import RestoreSite
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter, Result

_POLL_S = 0.1


class SocketsBack(Struct, frozen=True):
    """How the sockets of a restored job come back.

    ``in_our_network``: it will be in the machine's network, as it was. ``tcp``: what becomes of connections to programs
    outside; ``record``: those that the dump has kept. ``between``: the connections to its parts on other nodes.
    """

    in_our_network: bool
    tcp: TcpMode
    record: KeptRecord | None = None
    between: Between | None = None

    def to_bind(self, manifest: Manifest) -> tuple[Endpoint, ...]:
        """The machine's addresses to which its TCP sockets will be bound."""
        if not self.in_our_network:
            return ()
        kept = [*(manifest.connections if self.tcp == "keep" else ())]
        addresses: Mapping[str, str] = {}
        if self.between is not None:
            kept += self.between.connections
            addresses = self.between.addresses
        return tuple(moved(each, addresses) for each in (*manifest.endpoints, *(each.local for each in kept)))


def steps_before_criu(
    source: RestoreSource,
    site: Result[RestoreSite],
    images: Sequence[RestoreImages],
    files: FilesMode,
    sockets: SocketsBack,
    protection: Protection,
    deadline: float | None,
) -> list[StepBeforeCriu]:
    """The steps below that this snapshot needs, in order. ``images``: by tree."""
    manifest, tcp, between = source.snapshot.manifest, sockets.tcp, sockets.between
    steps: list[StepBeforeCriu] = []
    if manifest.shared_files:
        steps.append(PutBackSharedFiles(source, site, protection))
    if endpoints := sockets.to_bind(manifest):
        steps.append(FreePorts(site, endpoints, deadline))
    if files == "rewind" and (changed := [each for each in manifest.databases if state_now(each).newer]):
        steps.append(PutBackDatabases(source, changed))
    closes = (manifest.connections and tcp == "close") or (manifest.peers and between is None)
    if _changed_sizes(manifest.open_files) or closes or (between is not None and between.addresses):
        steps.append(AdaptFiles(manifest, site, images, files, tcp, protection, between=between))
    if between is not None and between.connections:
        steps.append(HoldBack(between.now(), protection))
    return steps


StepBeforeCriu: TypeAlias = "PutBackSharedFiles | FreePorts | PutBackDatabases | AdaptFiles | HoldBack"


class PutBackSharedFiles:
    """Restore the content of shared memory files before CRIU opens them."""

    name = "shared"

    def __init__(self, source: RestoreSource, site: Result[RestoreSite], protection: Protection) -> None:
        self._source = source
        self._site = site
        self._protection = protection
        self._files: SharedFiles | None = None

    def describe(self) -> str:
        """How many, and how large."""
        records = self._source.snapshot.manifest.shared_files
        size = format_bytes(sum(record.size_bytes for record in records))
        return f"put back {counted(len(records), 'file')} of shared memory, {size}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Write them. Returns their bytes."""
        root, mark = self._site.value.shared_root, os.urandom(8).hex()
        self._files = SharedFiles(root, self._source.folder, self._source.snapshot.manifest.shared_files, mark)
        if not self._site.value.isolated:  # otherwise they end with the sandbox
            files, folders = self._files.to_be_made()
            told = tuple(file for file in files if can_be_told(file.name))
            self._protection.protect(RemoveSharedFiles(str(root), mark, told, tuple(filter(can_be_told, folders))))
        try:
            return self._files.put_back()
        except OSError as e:
            raise Unsupported(
                f"files of shared memory cannot be put back into {root}: {e.strerror} ({e.filename})",
                hint="see how full it is (df /dev/shm) and who may write to it",
            ) from e

    def undo(self) -> None:
        """Restore what was there before."""
        if self._files is not None:
            self._files.undo()

    def close(self) -> None:
        """Discard what the undo would need."""
        if self._files is not None:
            self._files.close()


class FreePorts:
    """Remnants of closed connections can occupy the job's ports: end them, or wait for their end."""

    name = "ports"

    def __init__(self, site: Result[RestoreSite], endpoints: Sequence[Endpoint], deadline: float | None) -> None:
        self._site = site
        self._endpoints = endpoints
        self._deadline = deadline

    def describe(self) -> str:
        ports = sorted({each.port for each in self._endpoints})
        shown = ", ".join(map(str, ports[:5])) + (f" and {len(ports) - 5} more" if len(ports) > 5 else "")
        return f"free the job's ports ({shown}) of closed connections"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """End remnants of connections at the job's ports, if nobody has a socket there."""
        left_over = () if self._site.value.helper is not None else sock_diag.left_over_at(self._endpoints)
        if not left_over:  # or the privileged helper, which may, ends them
            return 0
        try:
            sock_diag.destroy(left_over)
            meter.note(f"{len(left_over)} closed connections at the job's ports have been ended")
        except OSError as e:
            if e.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                raise Unsupported(
                    f"closed connections at the job's ports cannot be ended: {e.strerror}",
                    hint="they end by themselves within a minute: try again then",
                ) from e
            meter.note(f"{len(left_over)} closed connections have the job's ports; the kernel frees them in a minute")
            self._wait(interrupts)
        return 0

    def undo(self) -> None:
        """Nothing: nobody had these connections any more."""

    def close(self) -> None:
        pass

    def _wait(self, interrupts: Interrupts) -> None:
        end = time.monotonic() + sock_diag.TIME_WAIT_LIMIT_S
        while sock_diag.left_over_at(self._endpoints):
            interrupts.check()
            now, deadline = time.monotonic(), self._deadline
            if now > end or (deadline is not None and now > deadline):
                raise DeadlineExceeded(
                    "timed out while closed connections still had the job's ports",
                    hint="try again in a minute, or give a longer --timeout (`ss -tan` shows them in TIME-WAIT)",
                )
            time.sleep(_POLL_S)


class AdaptFiles:
    """Tell CRIU about files whose size has changed since the dump, and about connections to the outside.

    The undo of a cut appends the rest again. The snapshot's images stay unchanged: CRIU gets a folder with a changed
    image, for each tree that needs one.
    """

    name = "files"

    def __init__(
        self,
        manifest: Manifest,
        site: Result[RestoreSite],
        images: Sequence[RestoreImages],
        files: FilesMode,
        tcp: TcpMode,
        protection: Protection,
        *,
        between: Between | None = None,
        in_view: bool = False,
    ) -> None:
        """``between``: connections to other parts of the job, which are kept.

        ``in_view``: the job will see files as its sandbox shows them, and nothing is made outside.
        """
        self._protection = protection
        self._manifest = manifest
        self._site = site
        self._images = images
        self._mode = files
        self._tcp = tcp
        self._between = between
        self._in_view = in_view
        self._peers = {each.connection for each in manifest.peers}
        self._cut: list[cut_back.CutOff] = []
        self.warnings: list[str] = []

    def describe(self) -> str:
        files = "keep files as they are now" if self._mode == "keep" else "cut files back to their size at the dump"
        return f"{files}; {'close' if self._tcp == 'close' else 'keep'} connections to the outside"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Cut files back, and make the changed images. Returns the bytes that were cut off."""
        original, outputs = self._images[0].original, self._site.value.outputs
        with images_read_from(original):
            images = [FilesImage.read(each.original) for each in self._images]
        files = [file for file in self._manifest.open_files if Path(file.path) not in outputs]
        if self._mode == "rewind":
            copied = {file.path for database in self._manifest.databases for file in database.files}
            self._cut_back([file for file in files if file.path not in copied], meter)
        with images_read_from(original):
            sizes = _changed_sizes(files, self._site.value.root if self._in_view else "")
            leading_out = sock_diag.outside_connections([each for image in images for each in image.tcp_sockets()])
            closed = [each for each in leading_out if self._is_closed(each.connection)]
            for image in images:
                image.adapt_to_sizes(sizes)
                image.close_connections(closed)
                if self._between is not None:
                    image.move(self._between.addresses)
        if not self._in_view:
            self._protection.protect(images_to_be_changed(self._images))
        for folder, image in zip(self._images, images, strict=True):
            if self._in_view:
                folder.use_view(self._site.value.shared_root)
            if image.is_changed:
                folder.change(image)
        return sum(cut.whole_bytes - cut.size_bytes for cut in self._cut)

    def _is_closed(self, connection: Connection) -> bool:
        """Of those that lead out: connections to other parts are kept if these are restored too."""
        if connection in self._peers:
            return self._between is None
        return self._tcp == "close"

    def undo(self) -> None:
        """Append to the files what was cut off."""
        while self._cut:
            cut_back.put_back(self._cut.pop())

    def close(self) -> None:
        """Remove the folders with the changed images."""
        for each in self._images:
            each.close()

    def _cut_back(self, files: Sequence[JobFile], meter: Meter) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S")
        spared = spared_by_rewind(files)
        launch = self._manifest.launch
        for file in files:
            is_log = launch is not None and file.path == launch.log_path  # it only reports; calling it twice is fine
            size_bytes = _size_bytes(file.path) if file.path not in spared and not is_log else None
            if file.is_written and size_bytes is not None and size_bytes > file.size_bytes:
                try:
                    cut = cut_back.cut_back(Path(file.path), file.size_bytes, stamp=stamp, about_to=self._about_to_cut)
                except OSError as e:
                    raise Unsupported(
                        f"{file.path} cannot be cut back to {file.size_bytes} bytes: {e.strerror}",
                        hint="restore with --files keep, or put it back as it was at the dump",
                    ) from e
                self._cut.append(cut)
                text = f"{size_bytes - file.size_bytes} bytes of {file.path} were cut off; they are in {cut.kept_as}"
                meter.note(text)
                self.warnings.append(text)

    def _about_to_cut(self, cut: CutOff) -> None:
        self._protection.protect(PutBackCuts(tuple(each for each in (*self._cut, cut) if can_be_told(each.path))))


def _changed_sizes(files: Sequence[JobFile], root: str = "") -> dict[str, tuple[int, int]]:
    """Per path the size at the dump and the one now, below ``root``. Replaced code is left out: CRIU must refuse it."""
    found: dict[str, tuple[int, int]] = {}
    for file in files:
        size_bytes = _size_bytes(root + file.path)
        if size_bytes is not None and size_bytes != file.size_bytes and (file.is_written or not file.is_mapped):
            found[file.path] = (file.size_bytes, size_bytes)
    return found


def _size_bytes(path: str) -> int | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
