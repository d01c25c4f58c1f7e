"""What a job needs outside its processes: files as they were, ports that are free, the other ends of connections."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from gpucr.diagnosis.preflight.databases import spared_by_rewind
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux import files_in_use, processes, sock_diag
from gpucr.model import Connection, Endpoint, Job, JobFile

FilesMode = Literal["keep", "rewind"]
"""Files that the job was writing and that have another size now: left as they are, or cut back to what they were."""

TcpMode = Literal["close", "keep"]
"""Connections whose other end is outside the job: closed in the restored job, or taken up again."""

_SHOWN = 3


def check_outside_connections(job: Job) -> list[Finding]:
    """Connections of a job that is to be dumped to programs outside it."""
    found = sock_diag.outside_connections(sock_diag.sockets_of(job.pids))
    if not found:
        return []
    return [
        Finding(
            "warning",
            f"the job has {_count(len(found), 'connection')} to programs outside it",
            _some([str(each.connection) for each in found]),
            "a restore closes them, and the job sees that as a network failure",
            "--tcp keep on the restore takes them up again, if the other ends still wait on this host",
        )
    ]


def check_kept_connections(connections: Sequence[Connection], tcp: TcpMode, *, left_running: bool) -> list[Finding]:
    """What becomes of a snapshot's connections to the outside. ``left_running``: the job went on after the dump."""
    if not connections:
        return []
    some = _some([str(each) for each in connections])
    what = f"the job had {_count(len(connections), 'connection')} to programs outside it"
    if tcp == "close":
        return [Finding("warning", f"{what}; they are closed", some, "the job sees a network failure", "--tcp keep")]
    if left_running:
        return [
            Finding(
                "blocking",
                f"{what}, which kept running after the dump",
                some,
                "what the restored job sends is taken for old data: the other ends would see it garbled or not at all",
                "restore with --tcp close, the default",
                code="GPUCR-CONNECTIONS",
            )
        ]
    absent = [str(each) for each in connections if not _is_address_here(each.local)]
    if absent:
        return [
            Finding(
                "blocking",
                "connections of the job have addresses that this machine lacks",
                _some(absent),
                "they can only be kept where they were",
                "restore with --tcp close, the default, or on the machine of the dump",
                code="GPUCR-CONNECTIONS",
            )
        ]
    return [Finding("warning", f"{what}; they are taken up again", some, "the other ends may be gone", "--tcp close")]


def check_ports(endpoints: Collection[Endpoint]) -> list[Finding]:
    """Whether other programs have the ports that the job's sockets are bound to again."""
    taken = sock_diag.in_the_way([each for each in sock_diag.tcp_sockets() if not each.is_left_over], endpoints)
    if not taken:
        return []
    owners = _owners({each.inode for each in taken})
    return [
        Finding(
            "blocking",
            f"{endpoint} is in use",
            f"by process {owners[each.inode]}" if each.inode in owners else f"inode {each.inode} of sock_diag",
            "the job's socket cannot be bound there again",
            "end that program; if it is the job itself, it is still running and needs no restore",
            owners.get(each.inode),
            code="GPUCR-ADDRESS-IN-USE",
        )
        for endpoint, each in {each.local: each for each in taken}.items()
    ]


def check_files(files: Sequence[JobFile], folders: Sequence[str], mode: FilesMode) -> list[Finding]:
    """The files that the job had open or mapped, and the folders, as they are now. Contents are not compared.

    Of databases, which `check_changed_databases` judges, only those that are shorter now.
    """
    missing = [folder for folder in folders if not os.path.isdir(folder)]
    found: list[Finding] = []
    changed: list[tuple[JobFile, int]] = []
    databases = spared_by_rewind(files)
    for file in files:
        size_bytes = _size(file.path)
        if size_bytes is None:
            missing.append(file.path)
        elif size_bytes != file.size_bytes and (file.path not in databases or size_bytes < file.size_bytes):
            changed.append((file, size_bytes))
    if missing:
        found.append(
            Finding(
                "blocking",
                f"{_count(len(missing), 'file or folder', 'files or folders')} of the job are missing",
                _some(missing),
                "the job had them open, and CRIU restores no job without them",
                "put them where they were",
                code="GPUCR-FILE-MISSING",
            )
        )
    found += [_judge(file, size_bytes, mode) for file, size_bytes in changed]
    if mode == "rewind":
        found += _check_writers([file.path for file, size_bytes in changed if _is_cut_back(file, size_bytes)])
    return found


def check_shared_files(in_use: Mapping[str, tuple[int, int]]) -> list[Finding]:
    """Whether programs use files of shared memory that are about to be replaced. ``in_use``: device and inode."""
    if not in_use:
        return []
    owners = files_in_use.holders(set(in_use.values()))
    return [
        Finding(
            "blocking",
            f"the shared memory file {name} is in use",
            f"by process {owners[inode]} ({_name(owners[inode])})",
            "the job needs that name, with the content of the dump",
            "end that program; if it is the job itself, it is still running and needs no restore",
            owners[inode],
            code="GPUCR-FILE-IN-USE",
        )
        for name, inode in in_use.items()
        if inode in owners
    ]


def _judge(file: JobFile, size_bytes: int, mode: FilesMode) -> Finding:
    grown = size_bytes > file.size_bytes
    change = f"{abs(size_bytes - file.size_bytes)} bytes {'longer' if grown else 'shorter'}"
    what = f"{file.path} is {change} than at the dump"
    evidence = f"{size_bytes} bytes, {file.size_bytes} then"
    if not file.is_written:
        return Finding(
            "blocking",
            what,
            evidence,
            "the job only read it: it may be another file by now, and positions in it mean something else",
            "put the file back as it was"
            + ("" if file.is_mapped else ", or insist if what is new was added at its end"),
            code="GPUCR-FILE-CHANGED",
        )
    if file.is_mapped and not grown:
        return Finding(
            "blocking",
            what,
            evidence,
            "memory of the job is pages of it that are gone",
            "put the file back as it was",
            code="GPUCR-FILE-CHANGED",
        )
    if mode == "keep":
        return Finding(
            "warning",
            what,
            evidence,
            "it is left as it is, and the job appends to it",
            "--files rewind cuts it back to what it was" if grown else "put the file back as it was",
        )
    if grown:
        return Finding(
            "warning", what, evidence, "it is cut back, and what is cut off is kept beside it", "--files keep"
        )
    return Finding(
        "blocking",
        what,
        evidence,
        "what is missing cannot be brought back",
        "restore with --files keep",
        code="GPUCR-FILE-CHANGED",
    )


def _is_cut_back(file: JobFile, size_bytes: int) -> bool:
    return file.is_written and size_bytes > file.size_bytes


def _check_writers(paths: Sequence[str]) -> list[Finding]:
    inodes = {}
    for path in paths:
        status = os.stat(path)
        inodes[(status.st_dev, status.st_ino)] = path
    return [
        Finding(
            "blocking",
            f"{inodes[inode]} is to be cut back and is in use",
            f"by process {pid} ({_name(pid)})",
            "that program may be writing to it",
            "end that program, or restore with --files keep",
            pid,
            code="GPUCR-FILE-IN-USE",
        )
        for inode, pid in (files_in_use.holders(set(inodes)) if inodes else {}).items()
    ]


def _size(path: str) -> int | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _is_address_here(end: Endpoint) -> bool:
    return sock_diag.is_local_address(end.address)


def _owners(inodes: Collection[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pid in processes.all_pids():
        with contextlib.suppress(PermissionError):
            for inode in sock_diag.inodes_of([pid]):
                if inode in inodes:
                    found.setdefault(inode, pid)
    return found


def _name(pid: int) -> str:
    status = processes.read_stat(pid)
    return status.name if status is not None else "ended"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _some(items: Sequence[str]) -> str:
    rest = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + rest
