"""What `gpucr on-demand` costs: bytes a second beside a plain loop, and thousands of idle connections."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import some_driver
from gpucr.cli.output import print_json
from gpucr.linux import descriptor_limit
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.listing import OnDemandJob, look
from tests.ports import lasting_port

JOB = Path(__file__).parent / "forwarding_job.py"
NAME = "forwarded"
PLAIN_LOOP = """
import socket, sys, threading

def copy(source, sink):
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    while count := source.recv_into(buffer):
        sink.sendall(view[:count])
    sink.shutdown(socket.SHUT_WR)

with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
    while True:
        client, _ = listener.accept()
        job = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
        threading.Thread(target=copy, args=(client, job), daemon=True).start()
        threading.Thread(target=copy, args=(job, client), daemon=True).start()
"""
_LIMIT_S, _LOOK_EVERY_S, _WATCH_S = 120.0, 0.05, 10.0
_BUFFER_BYTES = 1 << 20
_OWN_DESCRIPTORS = 200


def wait(is_so: Callable[[], bool], what: str) -> None:
    """Until it is so. Raises ClickException where that takes too long."""
    until = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > until:
            raise click.ClickException(f"waited {_LIMIT_S:g} s for {what}")
        time.sleep(_LOOK_EVERY_S)


def is_open(port: int) -> bool:
    """Whether somebody listens."""
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


def gpucr(*words: object) -> None:
    """Run it. Raises ClickException with what it says if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "gpucr", *map(str, words)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise click.ClickException(f"gpucr {words[0]} ended with {done.returncode}:\n{done.stderr}")


@contextlib.contextmanager
def served(*options: object) -> Iterator[tuple[int, int]]:
    """A job with a forwarder. Yields the forwarder's port, and the job's."""
    port = lasting_port(count=2)
    job_port = port + 1
    words = ("--name", NAME, "--no-isolate", "--on-demand", f"{port}:{job_port}", *options)
    gpucr("run", *words, "--", sys.executable, "-S", JOB, job_port)
    try:
        wait(lambda: is_open(job_port), "the job to listen")
        yield port, job_port
    finally:
        gpucr("on-demand", NAME, "--leave")
        gpucr("kill", NAME)
        gpucr("jobs", "--forget", NAME)


@contextlib.contextmanager
def plain_loop(job_port: int) -> Iterator[tuple[int, int]]:
    """The least that Python can do. Yields its port and its pid."""
    port = lasting_port()
    running = subprocess.Popen([sys.executable, "-S", "-c", PLAIN_LOOP, str(port), str(job_port)])
    try:
        wait(lambda: is_open(port), "the plain loop")
        yield port, running.pid
    finally:
        running.kill()
        running.wait()


def forwarder_pid() -> int:
    """Of the job's forwarder."""
    found = OnDemandFolder(NAME).running()
    if found is None:
        raise click.ClickException("the forwarder has ended")
    return found.pid


def processor_s(pid: int) -> float:
    """Processor seconds of a process so far (proc(5), utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Its memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def fetch(port: int, size_bytes: int) -> float:
    """Seconds until so many bytes have come."""
    with socket.create_connection(("127.0.0.1", port), _LIMIT_S) as made:
        buffer, left_bytes = bytearray(_BUFFER_BYTES), size_bytes
        begun_s = time.perf_counter()
        made.sendall(b"GET /%d HTTP/1.1\r\n\r\n" % size_bytes)
        while left_bytes > 0:
            count = made.recv_into(buffer)
            if not count:
                raise click.ClickException(f"the connection ended {left_bytes} bytes early")
            left_bytes -= count
        return time.perf_counter() - begun_s


def rates(gb: float, rounds: int) -> list[dict[str, Any]]:
    """Each way in turn, several times: GB/s, and processor seconds of what stands between for each GB."""
    size_bytes, found = int(gb * 1e9), dict[str, list[tuple[float, float]]]()
    with served("--http") as (port, job_port), plain_loop(job_port) as (loop_port, loop_pid):
        ways = {"direct": (job_port, None), "plain loop": (loop_port, loop_pid), "gpucr": (port, forwarder_pid())}
        for number in range(rounds + 1):
            for name, (each, pid) in ways.items():
                before_s = 0.0 if pid is None else processor_s(pid)
                seconds = fetch(each, size_bytes)
                used_s = 0.0 if pid is None else processor_s(pid) - before_s
                if number:  # the first one warms up
                    found.setdefault(name, []).append((gb / seconds, used_s / gb))
    return [
        {
            "way": name,
            "gb_per_s": round(statistics.median(rate for rate, _ in measured), 2),
            "fastest_gb_per_s": round(max(rate for rate, _ in measured), 2),
            "processor_s_per_gb": round(statistics.median(used for _, used in measured), 2),
        }
        for name, measured in found.items()
    ]


def status() -> OnDemandJob:
    """What the forwarder says."""
    found = look(NAME)
    if found is None:
        raise click.ClickException("the job is not served any more")
    return found


def asked(made: socket.socket) -> None:
    """One request, and its answer."""
    made.sendall(b"GET /1 HTTP/1.1\r\n\r\n")
    answer = made.recv(4096)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise click.ClickException(f"a request was answered with {answer!r}")


def idle(connections: int) -> dict[str, Any]:
    """So many keep-alive connections that have asked once; the job goes to sleep, and one of them wakes it."""
    with served("--http", "--idle", "3s") as (port, _), contextlib.ExitStack() as opened:
        pid = forwarder_pid()
        before_bytes = resident_bytes(pid)
        made = []
        for _ in range(connections):
            made.append(opened.enter_context(socket.create_connection(("127.0.0.1", port), _LIMIT_S)))
            asked(made[-1])
        wait(lambda: status().phase == "asleep", "the job to sleep")
        before_s, begun_s = processor_s(pid), time.monotonic()
        time.sleep(_WATCH_S)
        used = (processor_s(pid) - before_s) / (time.monotonic() - begun_s)
        open_count = status().open_connections
        begun_s = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), _LIMIT_S) if not made else made[0] as client:
            asked(client)
        return {
            "connections": open_count,
            "memory_mib": round((resident_bytes(pid) - before_bytes) / (1 << 20), 1),
            "processor_percent": round(100 * used, 1),
            "wake_s": round(time.perf_counter() - begun_s, 3),
        }


def print_table(ways: Sequence[dict[str, Any]], open_ones: Sequence[dict[str, Any]]) -> None:
    """What was measured."""
    for each in ways:
        click.echo(
            f"{each['way']:12}{each['gb_per_s']:6.2f} GB/s, fastest {each['fastest_gb_per_s']:.2f}, "
            f"{each['processor_s_per_gb']:.2f} s of a processor for each GB"
        )
    for each in open_ones:
        click.echo(
            f"{each['connections']} idle connections: {each['memory_mib']} MiB, {each['processor_percent']} % of a "
            f"processor; the job sleeps, and a request wakes it in {each['wake_s']} s"
        )


@click.command()
@click.option("--gb", default=2.0, show_default=True, type=click.FloatRange(min=0.001), help="Bytes of a response, GB.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Responses of each way.")
@click.option("--connections", default="0,10000", show_default=True, help="Idle connections, as many as limits allow.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(gb: float, rounds: int, connections: str, as_json: bool) -> None:
    """What forwarding costs on the loopback device, beside a plain loop in Python; and idle connections.

    A connection takes two descriptors of the forwarder: 10000 need a hard limit of 20100 (ulimit -Hn). Without a GPU
    the job is on the simulated driver.

    \b
    Example:
      python3 -m benchmarks forwarding
    """
    with contextlib.ExitStack() as opened:
        opened.enter_context(descriptor_limit.raised())
        opened.enter_context(some_driver(1.0))
        os.environ["XDG_STATE_HOME"] = opened.enter_context(tempfile.TemporaryDirectory(prefix="gpucr-forwarding-"))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: sys.exit(1))
        ways = rates(gb, rounds)
        most = (descriptor_limit.most() - _OWN_DESCRIPTORS) // 2
        open_ones = [idle(min(int(each), most)) for each in connections.split(",")]
    if as_json:
        print_json("benchmark.forwarding", {"gb": gb, "rounds": rounds, "ways": ways, "idle": open_ones})
    else:
        print_table(ways, open_ones)
