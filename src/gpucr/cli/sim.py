"""`gpucr sim`: the simulated driver's environment, and the programs that come with it."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from gpucr.cli.durations import Limit
from gpucr.cli.options import complete_folder, json_option
from gpucr.cli.output import print_json
from gpucr.cli.suggesting import SuggestingGroup
from gpucr.errors import DeadlineExceeded, DriverUnavailable
from gpucr.sim.build import build, environment

_RETRY_S = 0.05
_MOST_GPUS = 16


class _Gpus(click.ParamType):  # type: ignore[type-arg]  # click 8.1 knows no arguments
    """What the simulated driver takes for its GPUs: checked here, since it only tells the program that starts CUDA."""

    name = "gpus"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        count = 0
        for each in str(value).split(","):
            found = re.fullmatch(r"(?:(\d+)x)?0*[1-9]\d*(?:GiB|MiB)?", each)
            if found is None:
                self.fail(f"{each!r} names no GPUs: write 16GiB, 2x16GiB or 2x16GiB,80GiB", param, ctx)
            count += int(found[1] or 1)
        if not 1 <= count <= _MOST_GPUS:
            self.fail(f"a simulated machine has 1 to {_MOST_GPUS} GPUs, not {count}", param, ctx)
        return str(value)


@click.group("sim", cls=SuggestingGroup)
def command() -> None:
    """Work without a GPU: a simulated driver, and small CUDA programs to try things on.

    \b
    Example:
      eval "$(gpucr sim env)"
      gpucr sim counter --port 7000 --mib 64 &
      gpucr ps
    """


@command.command("env")
@click.option(
    "--gpus",
    type=_Gpus(),
    default="2x16GiB",
    show_default=True,
    metavar="SPEC",
    help="[COUNTx]SIZE in GiB or MiB, comma separated.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Where device memory in use is counted.",
    shell_complete=complete_folder,
)
@click.option("--machine", metavar="NAME", help="Another name gives GPUs with other UUIDs.")
@click.option("--old-driver", is_flag=True, help="A driver without the checkpoint API.")
@json_option
def env(gpus: str, state_dir: Path | None, machine: str | None, old_driver: bool, as_json: bool) -> None:
    """Print the variables that put the simulated driver in place.

    \b
    Example:
      eval "$(gpucr sim env --gpus 2x16GiB)"
    """
    driver_kind = "old" if old_driver else "current"
    variables = environment(gpus, state_dir=state_dir, driver=driver_kind, machine=machine)  # type: ignore[arg-type]
    if as_json:
        print_json("sim.env", {"variables": variables})
        return
    for name, value in variables.items():
        click.echo(f"export {name}={_quoted(value)}")


def _quoted(value: str) -> str:
    quoted = shlex.quote(value)
    return quoted if quoted.startswith("'") else f"'{quoted}'"


@command.command("counter", short_help="Run a program that counts in GPU memory.")
@click.option("--port", type=click.IntRange(0, 65535), required=True, help="UDP port; 0 picks a free one.")
@click.option("--mib", type=click.IntRange(min=0), default=0, help="MiB of reproducible random bytes on each device.")
@click.option("--devices", default="0", show_default=True, metavar="0,1", help="The devices to use.")
@click.option("--start", type=click.IntRange(min=0), default=100, show_default=True, help="Number before the first.")
@click.option("--managed", is_flag=True, help="Also hold managed memory, which no driver can checkpoint.")
@click.option("--fork", type=click.IntRange(0, 64), default=0, help="Children, each a counter on PORT+1, PORT+2, ...")
@click.option("--cpu-parent", is_flag=True, help="Only the children use CUDA.")
@click.option("--no-cuda", is_flag=True, help="Answer from host memory.")
@click.option("--cuda-after", type=click.Path(), metavar="FILE", help="Start CUDA when FILE appears.")
@click.option("--by-file", is_flag=True, help="No socket: PORT.ask and PORT.answer in the working folder instead.")
@click.option("--no-shm", is_flag=True, help="Children without a common file in /dev/shm, which NCCL's ranks have.")
def counter(**options: int | str | bool | None) -> None:
    """Run the counter program: a number in GPU memory, answered and incremented over UDP.

    It runs on the real driver, or on the simulated one where its environment is in place, and prints one line that
    begins with "ready" when it answers. Each packet to 127.0.0.1:PORT gets the next number; the packet "verify"
    checks the random bytes, "busy MS" occupies the GPU for so long, "pid" tells the process id.

    \b
    Example:
      gpucr sim counter --port 7000 --mib 64 &
      gpucr sim ask 7000
    """
    if not options["no_cuda"]:
        _require_libcuda()
    _become("counter", list(_counter_arguments(options)))


@command.command("ask", short_help="Ask a counter program, and print its answer.")
@click.argument("port", type=click.IntRange(1, 65535))
@click.argument("text", default="hello")
@click.option(
    "--timeout",
    "timeout_s",
    type=Limit(),
    default="10s",
    show_default=True,
    metavar="TIME",
    help="How long to wait for the answer.",
)
def ask(*, port: int, text: str, timeout_s: float) -> None:
    """Send TEXT to a counter program on this machine, and print what it answers. Waits until it is ready.

    \b
    Example:
      gpucr sim ask 7000
      gpucr sim ask 7000 verify
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            click.echo(_answer(port, text, deadline - time.monotonic()))
            return
        except OSError as e:
            if time.monotonic() + _RETRY_S > deadline:
                raise DeadlineExceeded(
                    f"no counter answers on port {port}",
                    hint="is it suspended, or in a sandbox (`gpucr exec NAME -- gpucr sim ask PORT`)?",
                ) from e
        time.sleep(_RETRY_S)


def _answer(port: int, text: str, timeout_s: float) -> str:
    """Raises ConnectionRefusedError if nothing is bound to the port, TimeoutError without an answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talk:
        talk.settimeout(max(timeout_s, _RETRY_S))
        talk.connect(("127.0.0.1", port))
        talk.send(text.encode())
        return talk.recv(4096).decode(errors="replace").strip()


@command.command("ranks")
@click.argument("count", type=click.IntRange(1, 256), metavar="N")
@click.option(
    "--status-dir",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="One file a rank.",
    shell_complete=complete_folder,
)
@click.option("--mib", type=click.IntRange(min=0), default=0, help="MiB of reproducible random bytes in each rank.")
@click.option("--step-ms", type=click.FloatRange(min=0), default=5, show_default=True, help="CPU time of a step.")
@click.option("--skew", type=click.IntRange(0, 100), default=50, show_default=True, help="Per cent more or less.")
@click.option("--gpu-ms", type=click.FloatRange(min=0), default=0, show_default=True, help="GPU time of a step.")
@click.option("--queue", type=click.IntRange(1, 16), default=4, show_default=True, help="Collectives under way.")
def ranks(*, count: int, status_dir: Path, mib: int, step_ms: float, skew: int, gpu_ms: float, queue: int) -> None:
    """Run N ranks that all-reduce forever, as a job with NCCL does. Simulated driver only.

    A rank works for its own time, submits a collective, and may have --queue of them under way before it waits for
    the others; with 1 it waits for every one. It prints one line that begins with "ready" when all have done a step.
    DIR/rank-NNN has one line of each: pid, steps done, their sum in device memory, and whether its memory is intact.

    \b
    Example:
      gpucr sim ranks 8 --status-dir status &
      gpucr suspend $!
    """
    _require_libcuda()
    options = {
        "--status-dir": status_dir.absolute(),
        "--mib": mib,
        "--step-us": round(step_ms * 1000),
        "--skew-percent": skew,
        "--gpu-us": round(gpu_ms * 1000),
        "--queue": queue,
    }
    words = [str(word) for option in options.items() for word in option]
    _become("ranks", [str(count), *words])


def _become(program: str, arguments: list[str]) -> NoReturn:
    """Run it under its bare name: `gpucr ps` shows ``counter --port 7``, not a path into a cache."""
    os.execv(build() / program, [program, *arguments])  # noqa: S606 (an argument list, no shell)


def _counter_arguments(options: Mapping[str, int | str | bool | None]) -> Iterator[str]:
    """Only the options given: the program has the same defaults."""
    context = click.get_current_context()
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            yield option
        elif value is not False and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            yield from (option, str(value))


def _require_libcuda() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise DriverUnavailable(
            "there is no CUDA driver: libcuda.so.1 cannot be loaded",
            hint='install the NVIDIA driver, or run `eval "$(gpucr sim env)"` first to use the simulated one',
        ) from e
