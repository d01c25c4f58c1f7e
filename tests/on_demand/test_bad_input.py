"""Clients, jobs and users that do what nobody expects: an error or a limit each, and the job stays."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import gpucr
from gpucr.errors import InvalidRequest, NotPermitted, Unsupported
from gpucr.linux import namespaces
from gpucr.on_demand import listening
from gpucr.on_demand.address import parse
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.neighbours import address_of, ask
from gpucr.on_demand.settings import OnDemand
from gpucr.on_demand.start import plan_on_demand, serve_on_demand
from tests import command
from tests.counter import DEADLINE_S, wait_until
from tests.on_demand.models import Models
from tests.ports import lasting_port
from tests.storm import later

pytestmark = [pytest.mark.root, pytest.mark.in_turn]


def refused(code: str, *words: object) -> str:
    """The message of a command that refuses a request."""
    done = command.run(words[0], "--json", *words[1:])
    assert done.returncode == InvalidRequest.exit_code, done.stderr
    error = json.loads(done.stdout)
    assert error["code"] == code, error
    assert error["hint"]
    return str(error["message"])


def test_a_port_that_is_taken(models: Models) -> None:
    model = models.run("llama")
    with socket.create_server(("127.0.0.1", model.port)):
        message = refused("GPUCR-ADDRESS", "on-demand", "llama", "--listen", model.listen)
        assert message.startswith(f"127.0.0.1:{model.port} cannot be listened on: Address already in use")
        refused("GPUCR-ADDRESS", "on-demand", "llama", "--listen", model.listen, "--dry-run")
        refused(
            "GPUCR-ADDRESS", "run", "--name", "other", "--no-isolate", "--on-demand", model.listen, "--", "sleep", "60"
        )
    assert [job.name for job in gpucr.list_jobs()] == ["llama"]
    assert model.ask(direct=True) == "llama 101"
    model.serve()
    assert model.ask() == "llama 102"


def test_the_jobs_own_port(models: Models) -> None:
    model = models.run("llama")
    with pytest.raises(InvalidRequest, match="both the forwarder's and the job's"):
        serve_on_demand("llama", OnDemand((str(model.job_port),)))


@pytest.mark.parametrize("listen", ["192.0.2.1:8000:1", "no.such.host.invalid:8000:1", "unix:/no/such/folder/a:1"])
def test_addresses_that_are_not_here(models: Models, listen: str) -> None:
    models.run("llama")
    with pytest.raises(InvalidRequest, match="cannot be listened on") as caught:
        serve_on_demand("llama", OnDemand((listen,)))
    assert caught.value.code == "GPUCR-ADDRESS"


def test_a_file_is_not_replaced_by_a_socket(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("kept")
    with pytest.raises(InvalidRequest, match="another file has this name"):
        listening.listen(parse(f"unix:{tmp_path}/data:1"))
    assert (tmp_path / "data").read_text() == "kept"
    with (
        listening.listening((parse(f"unix:{tmp_path}/a:1"),)),
        pytest.raises(InvalidRequest, match="Address already in use"),
    ):
        listening.listen(parse(f"unix:{tmp_path}/a:1"))
    assert not (tmp_path / "a").exists()


def test_jobs_that_are_none(models: Models) -> None:
    model = models.run("llama")
    with pytest.raises(InvalidRequest, match="no job"):
        serve_on_demand("nobody", OnDemand(("8000:1",)))
    with pytest.raises(InvalidRequest, match="not served on demand") as caught:
        gpucr.end_forwarders(["llama"])
    assert caught.value.code == "GPUCR-NOT-ON-DEMAND"
    model.serve()
    with pytest.raises(InvalidRequest, match="has a forwarder already") as caught:
        model.serve()
    assert caught.value.code == "GPUCR-ON-DEMAND"
    gpucr.end_forwarders(["llama"])
    with pytest.raises(InvalidRequest, match="has no forwarder"):
        gpucr.end_forwarders(["llama"])
    gpucr.stop_job("llama", grace_s=0.0)
    with pytest.raises(InvalidRequest, match="does not run"):
        model.serve()


def test_damaged_files(models: Models) -> None:
    model = models.start("llama")
    gpucr.end_forwarders(["llama"])
    for name in ("settings.json", "state.json"):
        path = OnDemandFolder("llama").path / name
        before = path.read_bytes()
        for damage in (b"", b"{}", before.replace(b"0", b'"x"', 1), before[:-10]):
            path.write_bytes(damage)
            with pytest.raises(InvalidRequest) as caught:
                model.serve()
            assert caught.value.code == "GPUCR-ON-DEMAND-DAMAGED"
        path.write_bytes(before)
    model.serve()
    assert model.ask() == "llama 101"


def test_a_job_without_a_listener(models: Models) -> None:
    model = models.run("llama")
    serve_on_demand("llama", OnDemand((f"{model.port}:{lasting_port()}",), wake_timeout_s=0.3, http=True))
    status, text = model.response()
    assert status == 503
    assert "the job llama does not listen on port" in text
    assert model.served.counts.refused == {"no-listener": 1}


def test_a_job_that_has_died(models: Models) -> None:
    model = models.start("llama")
    gpucr.stop_job("llama", grace_s=0.0)
    wait_until(lambda: model.phase == "gone", "its end to be noticed")
    status, text = model.response()
    assert (status, "cannot be woken: it does not run any more" in text) == (503, True)
    gpucr.forget_job("llama")
    status, text = model.response()
    assert (status, "it was forgotten" in text) == (503, True)


def test_a_wake_that_fails_leaves_the_job_asleep(models: Models) -> None:
    model = models.asleep("llama", faults="restore#1=999")
    status, text = model.response()
    assert status == 503
    assert text
    assert (model.phase, model.state) == ("asleep", "suspended")
    (told,) = model.events("wake-failed")
    assert told["code"] == "GPUCR-DRIVER"
    assert model.served.counts.wakes == {"failed": 1}
    assert model.ask() == "llama 101"


def test_plain_clients_are_closed_when_a_wake_fails(models: Models) -> None:
    model = models.asleep("llama", faults="restore#1=999", http=False)
    with model.connect() as made:
        made.sendall(b"hello")
        assert made.recv(100) == b""


def test_a_job_that_can_never_fit_is_an_error_at_once(models: Models) -> None:
    model = models.asleep("llama")
    model.kill_forwarder()
    folder = OnDemandFolder("llama")
    code = """
import sys
from gpucr.driver import gpus
from msgspec.structs import replace
from gpucr.on_demand import run, turn
found = gpus.list_gpus()
turn.list_gpus = lambda: tuple(replace(each, memory_total_bytes=1 << 20) for each in found)
run.forward(sys.argv[1])
"""
    smaller = subprocess.Popen([sys.executable, "-c", code, "llama"])
    try:
        wait_until(lambda: model.phase == "asleep", "the forwarder")
        status, text = model.response()
        assert status == 503
        assert "cannot be woken: it needs" in text
        assert model.events("wake-failed")[-1]["code"] == "GPUCR-ON-DEMAND-TOO-LARGE"
    finally:
        smaller.terminate()
        assert smaller.wait(DEADLINE_S) == 0
    assert folder.running() is None


@pytest.mark.criu
@pytest.mark.parametrize("wake_on", [(), ("auto",)], ids=["its own", "any"])
def test_a_gpu_that_is_lost(
    models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wake_on: tuple[str, ...]
) -> None:
    model = models.asleep("llama", devices="1", wake_on=wake_on)
    gpucr.end_forwarders(["llama"])
    monkeypatch.setenv("GPUCR_SIM_GPUS", "1x200MiB")
    model.serve(wake_on=wake_on)
    status, text = model.response()
    assert (status, "is not here any more" in text) == (503, True), text
    assert (model.phase, model.events("wake-failed")[-1]["code"]) == ("asleep", "GPUCR-ON-DEMAND-TOO-LARGE")
    gpucr.dump("llama", tmp_path / "away")  # as the error's page says
    monkeypatch.setenv("GPUCR_SIM_GPUS", "2x200MiB")
    gpucr.end_forwarders(["llama"])
    gpucr.restore(tmp_path / "away")
    model.serve()
    assert model.ask() == "llama 101"


def test_a_byte_now_and_then_does_not_keep_others_away(models: Models) -> None:
    waits = models.asleep("waits", mib=150)
    slow = models.start("slow", mib=150, request_limit_s=1.0)
    with slow.connect() as made:
        made.sendall(b"G")
        wait_until(lambda: slow.served.open_requests == 1, "the request")
        assert waits.ask() == "waits 101"
        assert made.recv(100) == b""
    assert slow.served.counts.refused == {"request-limit": 1}
    assert slow.ask() == "slow 101"


def test_a_client_that_never_reads_fills_no_memory(models: Models) -> None:
    waits = models.asleep("waits", mib=150)
    model = models.start("llama", mib=150, request_limit_s=1.0)
    forwarder = OnDemandFolder("llama").running()
    assert forwarder is not None
    with model.connect() as made:
        made.sendall(b"GET /big?500000000 HTTP/1.1\r\n\r\n")
        wait_until(lambda: model.served.counts.moved_bytes["out"] > 0, "the answer to begin")
        pages = int(Path(f"/proc/{forwarder.pid}/statm").read_text().split()[1])
        assert pages * os.sysconf("SC_PAGE_SIZE") < 200 << 20
        assert waits.ask() == "waits 101"
        assert model.served.counts.moved_bytes["out"] < 100 << 20
    assert model.served.counts.refused == {"request-limit": 1}


def limited(name: str, files: int, *options: str) -> subprocess.Popen[str]:
    """A forwarder that may open so many files."""
    return subprocess.Popen(
        command.command("on-demand", name, *options),
        text=True,
        stderr=subprocess.PIPE if not options else None,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),  # noqa: PLW1509 - one thread
    )


@pytest.mark.parametrize("http", [pytest.param(True, id="http"), later(False, id="plain")])
def test_many_connections_with_few_descriptors(models: Models, http: bool) -> None:
    model = models.start("llama", http=http)
    gpucr.end_forwarders(["llama"])
    few = limited("llama", 256, "--foreground")
    try:
        wait_until(lambda: model.phase == "serving", "the forwarder")
        with contextlib.ExitStack() as opened:
            made = [opened.enter_context(model.connect()) for _ in range(300)]
            wait_until(lambda: model.served.counts.refused.get("full", 0) >= 200, "the limit")
            assert made[-1].recv(12) == (b"HTTP/1.1 503" if http else b"")
            made[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert made[0].recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: model.served.open_connections == 0, "the connections to end")
        assert model.ask() == "llama 102"
        gpucr.suspend("llama")
        model.wait("asleep")
        assert model.ask() == "llama 103"
    finally:
        few.terminate()
        assert few.wait(DEADLINE_S) == 0


def test_too_few_descriptors_for_any_connection(models: Models) -> None:
    models.start("llama")
    gpucr.end_forwarders(["llama"])
    assert limited("llama", 64, "--foreground").wait(DEADLINE_S) == Unsupported.exit_code
    in_background = limited("llama", 64)  # says the same
    _, said = in_background.communicate(timeout=DEADLINE_S)
    assert (in_background.returncode, "raise the limit to 112" in said) == (Unsupported.exit_code, True), said


FROM_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=sys.argv[2])
os.execv(sys.executable, [sys.executable, "-m", "gpucr", "on-demand", "llama", "--foreground"])
"""


def as_systemd_starts_it(handed: socket.socket, count: int) -> subprocess.Popen[str]:
    """A forwarder of llama that gets the socket, and is told that there are so many."""
    words = [sys.executable, "-c", FROM_SYSTEMD, str(handed.fileno()), str(count)]
    kept = ("PATH", "LD_LIBRARY_PATH", "XDG_STATE_HOME", "PYTHONPATH")  # of little that a service has
    own = {name: value for name, value in os.environ.items() if name in kept or name.startswith("GPUCR_")}
    return subprocess.Popen(words, pass_fds=[handed.fileno()], stderr=subprocess.PIPE, text=True, env=own)


@pytest.mark.parametrize("lazily", [False, True], ids=["a job that runs", "a job that starts later"])
def test_sockets_of_systemd(models: Models, lazily: bool) -> None:
    model = models.later("llama") if lazily else models.start("llama")
    gpucr.end_forwarders(["llama"])
    with socket.create_server(("127.0.0.1", 0)) as handed:
        wrong = as_systemd_starts_it(handed, 2)
        assert wrong.wait(DEADLINE_S) == InvalidRequest.exit_code
        assert "what systemd hands over as descriptor 4 is not a socket" in wrong.communicate()[1]
        model.port = handed.getsockname()[1]
        with model.connect() as early:  # systemd starts it for this one
            early.sendall(b"GET / HTTP/1.1\r\n\r\n")
            for number in (101, 102):
                right = as_systemd_starts_it(handed, 1)
                try:
                    if number == 101:
                        assert early.recv(12) == b"HTTP/1.1 200"
                    else:
                        assert model.ask() == "llama 102"
                finally:
                    right.send_signal(signal.SIGTERM)
                    assert right.wait(DEADLINE_S) == 0
                    right.communicate()
                assert model.state == "running"


def test_nonsense_on_the_socket_of_the_forwarders(models: Models) -> None:
    model = models.start("llama")
    forwarder = OnDemandFolder("llama").running()
    assert forwarder is not None
    address = address_of(forwarder.pid)
    for message in ({}, {"ask": "end"}, {"ask": "sleep"}, {"ask": "sleep", "for": {"name": 1}}, {"ask": ["look"]}):
        with pytest.raises((OSError, ValueError)):
            ask(address, message)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(address)
        raw.sendall(b"[" * 100_000)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(100) == b""
    assert (model.ask(), model.phase) == ("llama 101", "serving")


def test_a_dry_run_says_the_same_and_changes_nothing(models: Models) -> None:
    model = models.run("llama")
    plan = plan_on_demand("llama", OnDemand((model.listen,)))
    assert (plan.where, plan.is_refused) == ("awake", False)
    assert (plan.listen, plan.job_ports) == ((f"127.0.0.1:{model.port}",), (model.job_port,))
    assert plan.device_bytes[models.gpus[0]] >= 80 << 20
    printed = command.run_json("on-demand", "llama", "--listen", model.listen, "--dry-run")
    assert (printed["job_ports"], printed["problems"]) == ([model.job_port], [])
    assert not OnDemandFolder("llama").path.exists()
    done = command.run("on-demand", "llama", "--listen", model.listen, "--dry-run")
    assert (done.returncode, f"listen on 127.0.0.1:{model.port} to its port" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    "words",
    [(), ("--all", "--list"), ("--leave", "--dry-run", "llama"), ("--all", "llama"), ("llama", "--idle", "5m"),
     ("--listen", "8000")],
)  # fmt: skip
def test_options_that_do_not_go_together(gpus: list[str], words: Sequence[str]) -> None:
    assert command.run("on-demand", *words).returncode == InvalidRequest.exit_code
    lazily = ("run", "--start", "lazily", "--", "true")
    assert command.run(*lazily).returncode == InvalidRequest.exit_code


def test_a_job_that_starts_later_needs_a_name(gpus: list[str]) -> None:
    port = lasting_port(count=2)
    listen = f"{port}:{port + 1}"
    done = command.run("run", "--no-isolate", "--on-demand", listen, "--start", "lazily", "--", "true")
    assert (done.returncode, "needs a name now" in done.stderr) == (InvalidRequest.exit_code, True)


def test_a_network_that_cannot_be_entered(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.run("llama", isolate=True)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(namespaces, "in_namespace", refuse)
    with pytest.raises(NotPermitted, match="the network of the job llama cannot be entered"):
        serve_on_demand("llama", OnDemand((model.listen,)))


def test_missing_forwarders_are_started_again(models: Models) -> None:
    first, second = models.start("first"), models.asleep("second")
    gpucr.end_forwarders(["first"])
    second.kill_forwarder()
    assert [(each.name, each.phase) for each in gpucr.list_on_demand()] == [("first", "left"), ("second", "missing")]
    done = command.run("on-demand", "--all")
    assert done.returncode == 0
    assert ("second is served on demand again" in done.stdout, "first" in done.stdout) == (True, False)
    assert second.ask() == "second 101"
    with pytest.raises(ConnectionRefusedError):
        first.ask()


def test_settings_stay_when_only_the_job_is_named(models: Models) -> None:
    model = models.start("llama", idle_s=0.3)
    gpucr.end_forwarders(["llama"])
    listen = f"127.0.0.1:{model.listen}"
    assert OnDemand((listen,), idle_s=0.3, stay_s=0.2, http=True) == OnDemandFolder("llama").settings()
    assert command.run("on-demand", "llama").returncode == 0
    model.wait("asleep")
