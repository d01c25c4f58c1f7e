"""Connections that a dump keeps for a restore: taken up, or given up, and never forgotten."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.checkups import network as network_checkup
from gpucr.linux import nftables
from gpucr.network import kept
from gpucr.network.filters import Namespace
from gpucr.network.records import KeptRecord
from gpucr.operations.connections import close_kept, list_kept
from gpucr.snapshot.location import open_store
from tests.command import parsed
from tests.command import start as start_command
from tests.counter import wait_until
from tests.own_network import filters, own_network
from tests.stepping import Job, StartJob
from tests.store import dumps

pytestmark = pytest.mark.criu

SERVES = """
import socket
listener = socket.create_server((ADDRESS, lasting_port()), family=socket.AF_INET6 if ":" in ADDRESS else socket.AF_INET)
done(listener.getsockname()[1])
connection, _ = listener.accept()
step()
done("accepted")
while True:
    step()
    try:
        connection.sendall(b"answer")
        done(connection.recv(100).decode() or "end")
    except OSError as error:
        done(type(error).__name__)
"""


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    with own_network():
        yield


class Served:
    """A server with a client, which is this process, that waits for an answer."""

    def __init__(self, start: StartJob, address: str = "127.0.0.1") -> None:
        self.job: Job = start(SERVES.replace("ADDRESS", repr(address)).replace("lasting_port()", _port(address)))
        self.client = socket.create_connection((address, int(self.job.wait_done())))
        self.client.settimeout(60)
        assert self.job.go_on() == "accepted"

    def keep(self, to: Path | str) -> KeptRecord:
        """Dump it. Returns what is kept."""
        report = self.job.dump_and_end(to, tcp="keep")
        (record,) = [each for each in list_kept() if each.name == report.snapshot.manifest.kept]
        assert filters() == (record.name,)
        assert record.snapshot == report.snapshot.where
        self.client.setblocking(False)
        with pytest.raises(BlockingIOError):
            self.client.recv(1)
        self.client.settimeout(60)
        return record

    def assert_reset(self) -> None:
        with pytest.raises(ConnectionResetError):
            self.client.recv(1)
        assert filters() == ()
        assert not [each for each in list_kept() if each.snapshot.startswith(str(self.job.folder.parent))]


def _port(address: str) -> str:
    return "lasting_port()" if address == "127.0.0.1" else "0"


@pytest.fixture
def served(start: StartJob) -> Iterator[Served]:
    made = Served(start)
    with made.client:
        yield made


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_they_are_taken_up(start: StartJob, tmp_path: Path, address: str) -> None:
    served = Served(start, address)
    with served.client:
        served.keep(tmp_path / "s")
        served.client.sendall(b"question")
        gpucr.restore(tmp_path / "s")
        assert filters() == ()
        assert served.job.go_on() == "question"
        assert served.client.recv(100) == b"answer"


def test_a_restore_that_fails_leaves_them(served: Served, tmp_path: Path) -> None:
    served.keep(tmp_path / "s")
    with pytest.raises(gpucr.DeadlineExceeded):
        gpucr.restore(tmp_path / "s", timeout_s=0.000001)
    assert filters() != ()
    gpucr.restore(tmp_path / "s", tcp="keep")
    served.client.sendall(b"question")
    assert served.job.go_on() == "question"


KILLED = """
import os, signal, sys, gpucr
def listen(progress):
    if (progress.event, progress.phase) == ("end", "criu"):
        os.kill(os.getpid(), signal.SIGKILL)
gpucr.restore(sys.argv[1], on_progress=listen)
"""


def test_a_restore_that_is_killed_leaves_them(served: Served, tmp_path: Path) -> None:
    record = served.keep(tmp_path / "s")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "s")], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not served.job.pids(), "its keeper to end what was restored")
    assert filters() == (record.name,)
    gpucr.restore(tmp_path / "s")
    served.client.sendall(b"question")
    assert served.job.go_on() == "question"


def test_a_restore_can_give_them_up(served: Served, tmp_path: Path) -> None:
    served.keep(tmp_path / "s")
    report = gpucr.restore(tmp_path / "s", tcp="close")
    assert any("they are closed" in warning for warning in report.warnings)
    served.assert_reset()
    assert served.job.go_on() == "BrokenPipeError"


def test_they_are_listed_and_closed_by_name(served: Served, tmp_path: Path) -> None:
    record = served.keep(tmp_path / "s")
    findings = network_checkup.check(network_checkup.look(), None)
    assert any(f"1 connection of {tmp_path / 's'} kept since" in each.what for each in findings)
    assert close_kept(str(tmp_path / "s")) == record
    served.assert_reset()
    with pytest.raises(gpucr.InvalidRequest, match="no connections are kept under"):
        close_kept(record.name)
    with pytest.raises(gpucr.Unsupported, match="they are not kept on this machine"):
        gpucr.restore(tmp_path / "s", tcp="keep")
    gpucr.restore(tmp_path / "s")  # what is not kept is closed
    assert served.job.go_on() == "BrokenPipeError"


def test_the_command(served: Served, tmp_path: Path) -> None:
    record = served.keep(tmp_path / "s")
    (connection,) = record.connections
    listed = said_by("connections").splitlines()
    assert listed[0].split() == ["NAME", "SNAPSHOT", "SINCE", "CONNECTIONS"]
    assert f"{record.name}  {tmp_path / 's'}  {record.created}  {connection}" in listed
    found = parsed(said_by("connections", "--json"))
    (one,) = [each for each in found["kept"] if each["name"] == record.name]
    assert one["connections"][0]["remote"]["port"] == served.client.getsockname()[1]
    assert said_by("connections", "--close", record.name) == f"1 connection of {tmp_path / 's'} closed\n"
    served.assert_reset()
    assert record.name not in said_by("connections")


def said_by(*words: str) -> str:
    with start_command(*words) as started:
        said, complaint = started.communicate(timeout=60)
    assert started.returncode == 0, complaint
    return said


def test_they_end_with_a_folder(served: Served, tmp_path: Path) -> None:
    """The next gpucr of any kind sees that it is gone."""
    served.keep(tmp_path / "s")
    kept.give_up_lost()
    assert filters() != ()
    shutil.rmtree(tmp_path / "s")
    kept.give_up_lost()
    served.assert_reset()


def test_a_folder_that_cannot_be_seen_is_not_gone(served: Served, tmp_path: Path) -> None:
    """A disk that is not mounted."""
    (tmp_path / "disk").mkdir()
    record = served.keep(tmp_path / "disk" / "s")
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    kept.give_up_lost()
    assert filters() == (record.name,)
    close_kept(record.name)
    served.assert_reset()


@pytest.mark.parametrize("how", ["rm", "prune"])
def test_they_end_with_a_snapshot_in_a_store(served: Served, tmp_path: Path, how: str) -> None:
    gpucr.init_store(tmp_path / "store")
    served.keep(f"{tmp_path}/store#s")
    if how == "rm":
        gpucr.remove_snapshot(f"{tmp_path}/store#s")
    else:
        dumps.dump(open_store(tmp_path / "store"), {"images/a": dumps.piece(1)}, "later")
        rules = gpucr.PruneRules(keep_last=1)
        gpucr.prune_store(tmp_path / "store", rules, dry_run=True)
        assert filters() != ()
        gpucr.prune_store(tmp_path / "store", rules)
    served.assert_reset()


def test_a_record_whose_filter_is_gone(served: Served, tmp_path: Path) -> None:
    """Somebody has removed it, as `nft flush ruleset` does."""
    record = served.keep(tmp_path / "s")
    with nftables.opened() as connection:
        nftables.remove(connection, record.name)
    kept.give_up_lost()
    with Namespace() as own:
        assert kept.find(record.name) is None, own.inode


def test_they_cannot_be_kept_for_a_job_that_keeps_running(served: Served, tmp_path: Path) -> None:
    with pytest.raises(gpucr.InvalidRequest, match="a job that is left running keeps its connections"):
        gpucr.dump(served.job.pid, tmp_path / "s", leave_running=True, tcp="keep")
    with pytest.raises(gpucr.InvalidRequest, match="tcp is 'hold'"):
        gpucr.dump(served.job.pid, tmp_path / "s", tcp="hold")  # type: ignore[arg-type]


def test_they_cannot_be_kept_in_a_network_that_ends(start_sandboxed: StartJob, tmp_path: Path) -> None:
    job = start_sandboxed("done()\nstep()")
    with pytest.raises(gpucr.Unsupported, match="is in another network namespace"):
        gpucr.dump(job.pid, tmp_path / "s", tcp="keep")


def test_they_cannot_be_kept_without_a_filter(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_table(_: socket.socket) -> tuple[str, ...]:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(nftables, "tables", no_table)
    plan = gpucr.plan_dump(served.job.pid, tmp_path / "s", tcp="keep")
    assert [each.code for each in plan.findings if each.severity == "blocking"] == ["GPUCR-CONNECTIONS"]
    with pytest.raises(gpucr.Unsupported, match="packets cannot be blocked on this machine"):
        gpucr.dump(served.job.pid, tmp_path / "s", tcp="keep")
    served.job.dump_and_end(tmp_path / "s")  # without them it can
    assert served.client.recv(1) == b""
