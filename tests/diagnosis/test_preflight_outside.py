"""Preflight of surroundings: a job's external needs, checked against real files and sockets."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpucr.diagnosis.preflight import (
    Finding,
    TcpMode,
    check_files,
    check_kept_connections,
    check_outside_connections,
    check_ports,
    check_shared_files,
    surroundings,
)
from gpucr.linux import capabilities, processes, sock_diag
from gpucr.linux.files_in_use import files_in_use, holders
from gpucr.linux.sock_diag import TcpSocket, TcpState
from gpucr.model import Connection, Endpoint, Job, JobFile
from tests.conftest import skip_or_fail

LOOPBACK = "127.0.0.1"


def only(findings: Sequence[Finding]) -> Finding:
    (finding,) = findings
    assert all((finding.what, finding.evidence, finding.consequence, finding.remedy))
    return finding


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_bytes(bytes(100))
    return path


def job_file(path: Path, size_bytes: int, *, is_written: bool = True, is_mapped: bool = False) -> JobFile:
    return JobFile(str(path), size_bytes, is_written=is_written, is_mapped=is_mapped)


# --- files -----------------------------------------------------------------------------------------------------


def test_unchanged_files(log: Path) -> None:
    files = [job_file(log, 100), job_file(log, 100, is_written=False, is_mapped=True)]
    assert check_files(files, [str(log.parent)], "keep") == []
    assert check_files(files, [str(log.parent)], "rewind") == []


@pytest.mark.parametrize(
    ("size_then", "is_written", "is_mapped", "of_keep", "of_rewind"),
    [
        (70, True, False, "warning", "warning"),
        (70, True, True, "warning", "warning"),
        (130, True, False, "warning", "blocking"),
        (130, True, True, "blocking", "blocking"),
        (70, False, False, "blocking", "blocking"),
        (70, False, True, "blocking", "blocking"),
        (130, False, False, "blocking", "blocking"),
    ],
)
def test_files_of_another_size(
    log: Path, size_then: int, is_written: bool, is_mapped: bool, of_keep: str, of_rewind: str
) -> None:
    file = job_file(log, size_then, is_written=is_written, is_mapped=is_mapped)
    kept, rewound = only(check_files([file], [], "keep")), only(check_files([file], [], "rewind"))
    assert (kept.severity, rewound.severity) == (of_keep, of_rewind)
    assert f"30 bytes {'longer' if size_then == 70 else 'shorter'} than at the dump" in kept.what
    assert kept.evidence == f"100 bytes, {size_then} then"


def test_missing_files(log: Path) -> None:
    files = [job_file(log.with_name(name), 0) for name in "abc"]
    finding = only(check_files([*files, job_file(log, 100)], [str(log.parent / "d"), str(log)], "keep"))
    assert (finding.severity, finding.what) == ("blocking", "5 files or folders of the job are missing")
    assert finding.evidence == f"{log.parent / 'd'}, {log}, {files[0].path} and 2 more"


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    assert only(check_files([job_file(tmp_path, 0)], [], "keep")).what == "1 file or folder of the job are missing"


def test_an_open_file_is_not_cut_back(log: Path) -> None:
    with log.open("a") as other, subprocess.Popen(["sleep", "60"], stdout=other) as writer:
        other.close()
        warning, blocking = check_files([job_file(log, 70)], [], "rewind")
        writer.kill()
    assert (warning.severity, blocking.severity) == ("warning", "blocking")
    assert f"process {writer.pid}" in blocking.evidence


# --- files in use ----------------------------------------------------------------------------------------------


def test_files_in_use(log: Path) -> None:
    if not capabilities.can_checkpoint_processes():
        skip_or_fail("root", "/proc/PID/map_files is root's")
    mapped, gone = log.with_name("mapped"), log.with_name("gone")
    for path in (mapped, gone):
        path.write_bytes(bytes(5000))
    with log.open("ab"), mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0), gone.open("rb"):
        file.close()
        gone.unlink()
        found = {each.path: each for each in files_in_use([os.getpid()])}
    assert (found[str(log)].is_written, found[str(log)].is_mapped, found[str(log)].size_bytes) == (True, False, 100)
    assert (found[str(mapped)].is_written, found[str(mapped)].is_mapped) == (True, True)
    assert found[str(mapped)].inode == (mapped.stat().st_dev, mapped.stat().st_ino)
    assert not any("gone" in path for path in found), "it has no name"
    libraries = [each for each in found.values() if "libc.so" in each.path]
    assert [(each.is_written, each.is_mapped) for each in libraries] == [(False, True)]
    assert list(files_in_use([2**22 + 1])) == []


def test_shared_memory_mapped_by_other_processes() -> None:
    path = Path(f"/dev/shm/gpucr-test-{os.getpid()}")
    path.write_bytes(bytes(4096))
    try:
        inode = (path.stat().st_dev, path.stat().st_ino)
        assert holders({inode}) == {}
        assert check_shared_files({path.name: inode}) == []
        code = f"import mmap; f = open({str(path)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close(); print(); input()"
        with subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            assert holders({inode}) == {inode: holder.pid}
            assert holders({inode}, apart_from=[holder.pid]) == {}
            finding = only(check_shared_files({path.name: inode}))
            holder.kill()
        assert (finding.severity, finding.pid) == ("blocking", holder.pid)
        assert path.name in finding.what
    finally:
        path.unlink()


# --- TCP -------------------------------------------------------------------------------------------------------


def test_a_taken_port() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        finding = only(check_ports([Endpoint(LOOPBACK, port), Endpoint("10.0.0.1", port)]))
        assert (finding.severity, finding.what) == ("blocking", f"{LOOPBACK}:{port} is in use")
        assert (finding.pid, finding.evidence) == (os.getpid(), f"by process {os.getpid()}")
        assert only(check_ports([Endpoint("::", port)])).pid == os.getpid()
        assert check_ports([Endpoint("10.0.0.1", port)]) == []
    assert check_ports([Endpoint(LOOPBACK, port)]) == []


def test_connections_of_a_job_to_the_outside() -> None:
    code = (
        "import socket\n"
        "own = socket.create_server(('127.0.0.1', 0)); a = socket.create_connection(own.getsockname())\n"
        "b, _ = own.accept(); c = socket.create_connection(('127.0.0.1', int(input()))); print(); input()"
    )
    with (
        socket.create_server((LOOPBACK, 0)) as listener,
        subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        port = listener.getsockname()[1]
        child.stdin.write(f"{port}\n".encode())
        child.stdin.flush()
        child.stdout.readline()
        finding = only(check_outside_connections(Job(processes.tree(child.pid), ())))
        assert (finding.severity, finding.what) == ("warning", "the job has 1 connection to programs outside it")
        assert finding.evidence.endswith(f" to {LOOPBACK}:{port}")
        both = Job((*processes.tree(os.getpid())[:1], *processes.tree(child.pid)), ())
        with listener.accept()[0]:  # now this process is the other end, and of the job
            assert check_outside_connections(both) == []
        child.kill()


@pytest.mark.parametrize(
    ("address", "tcp", "is_inside", "is_refused"),
    [
        ("fe80::1", "close", True, True),
        ("fe80::1", "close", False, False),
        ("fe80::1", "keep", False, True),
        ("fd00::1", "close", True, False),
        ("169.254.0.1", "close", True, False),
    ],
)
def test_link_local_connections_that_would_be_restored(
    monkeypatch: pytest.MonkeyPatch, address: str, tcp: TcpMode, is_inside: bool, is_refused: bool
) -> None:
    """Of IPv6: CRIU binds them without the interface."""
    ends = Endpoint(address, 80), Endpoint(address, 40000)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [TcpSocket(family, TcpState.ESTABLISHED, *each, 1 + n) for n, each in enumerate((ends, ends[::-1]))]
    monkeypatch.setattr(sock_diag, "sockets_of", lambda *_: found[: 1 + is_inside])
    said = check_outside_connections(Job(processes.tree(os.getpid())[:1], ()), tcp)
    assert [each.code for each in said if each.severity == "blocking"] == ["GPUCR-CONNECTIONS"] * is_refused
    assert any("over IPv6 link-local addresses" in each.what for each in said) == is_refused


HERE = Connection(Endpoint(LOOPBACK, 40000), Endpoint("192.0.2.7", 443))


def test_treatment_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kept-1`` stands for a record on this machine."""
    monkeypatch.setattr(surroundings, "find", lambda name: name if name == "kept-1" else None)
    assert check_kept_connections([], "keep", None) == []
    assert only(check_kept_connections([HERE], "close", "kept-1")).severity == "warning"
    assert only(check_kept_connections([HERE], "keep", "kept-1")).severity == "warning"
    for kept, ours, why in (
        (None, True, "which the dump did not keep"),
        ("kept-2", True, "they are not kept on this machine"),
        ("kept-1", False, "is restored into a network of its own"),
    ):
        refused = only(check_kept_connections([HERE], "keep", kept, in_our_network=ours))
        assert (refused.severity, refused.code, why in refused.what) == ("blocking", "GPUCR-CONNECTIONS", True)
