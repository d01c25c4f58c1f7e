"""Type the commands of a page's console blocks into a shell, and compare the output with the page.

``python3 -m tests.docs.sessions PAGE`` shows what a page's commands print now, for whoever brings the page up to date.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucr.criu.install import provided_folder
from tests.ordinary_user import OrdinaryUser

TIMEOUT_S = 100
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^[#$] (.*)$")
_TALK = re.compile(r"^(error|why|log|hint|code|warning): ")
# Namespaces of the session's own: its ports are free, it sees only its own processes, and they end with it.
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--ipc")
_DROP_IN = Path(__file__).parents[2] / "scripts" / "cuda-checkpoint"
BEGIN = "from gpucr.linux.namespaces import bring_loopback_up; bring_loopback_up()"


@dataclass(frozen=True)
class Typed:
    """One command of a page, and the lines that the page shows below it."""

    command: str
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a command printed."""

    stdout: tuple[str, ...]
    stderr: tuple[str, ...]


def typed_in(text: str) -> list[Typed]:
    """The commands of all console blocks of a page, in their order."""
    found: list[tuple[str, list[str]]] = []
    for block in _BLOCK.findall(text):
        for line in block.splitlines():
            prompt = _PROMPT.match(line)
            if prompt:
                found.append((prompt[1], []))
            else:
                found[-1][1].append(line)
    return [Typed(command, tuple(shown)) for command, shown in found]


_HELPER = """
XDG_DATA_HOME={data} {python} -m gpucr helper listen \\
    --socket {folder}/socket --keys {folder}/keys --work {folder}/work >{folder}/out 2>&1 &
until [ -S {folder}/socket ]; do sleep 0.05; done
"""


def play(
    commands: Sequence[str], home: Path, instead: Mapping[str, str], user: OrdinaryUser | None = None
) -> list[Answer]:
    """Type the commands into one shell in ``home``; ``instead`` says what is typed instead of what is written.

    Needs root. ``user`` types them, with root's helper beside, else root. stdin of each command is empty. All that they
    started has ended when this returns.
    """
    folder = home / "answers"
    folder.mkdir(parents=True)
    lines = [f"cd '{home}'"]
    # Simulated GPUs are counted per machine by pid, and other sessions have the same pids.
    private = {"gpucr sim env": f"gpucr sim env --state-dir '{home}/gpus'"}
    for number, command in enumerate(commands):
        typed = _replaced(command, {**instead, **private})
        lines.append(f"{{ {typed}\n}} >'{folder}/{number}.out' 2>'{folder}/{number}.err' </dev/null")
    script = home / "session.sh"
    script.write_text("\n".join(lines) + "\n")
    given = environment(home)
    himself = shlex.join(user.as_himself()) if user is not None else ""
    helped = ""
    if user is not None:
        opened = tempfile.mkdtemp(prefix="gpucr-helper-")
        os.chmod(opened, 0o755)  # noqa: S103 - as /run is
        given["GPUCR_HELPER"] = f"{opened}/socket"
        helped = _HELPER.format(python=sys.executable, folder=opened, data=provided_folder().parents[1])
    typing = f'{helped}"{sys.executable}" -c "{BEGIN}" && exec {himself} setsid bash "{script}"'
    begin = [*ALONE, "sh", "-c", typing]
    if user is not None:
        given |= {name: value for name, value in user.environment.items() if name.startswith("XDG_")}
        given |= {"XDG_CACHE_HOME": str(user.home / ".cache"), "XDG_DATA_HOME": str(home / ".local/share")}
        for path in (home, *home.rglob("*")):
            os.chown(path, user.uid, user.uid)
        begin = user.enter(begin)
    with subprocess.Popen(begin, env=given, start_new_session=True) as shell:
        try:
            shell.wait(TIMEOUT_S)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    if user is not None:
        shutil.rmtree(opened)
    back = {meant: written for written, meant in instead.items()} | {str(home): "/root"}
    if user is not None:
        back[user.name] = "root"
    return [Answer(_lines(folder / f"{n}.out", back), _lines(folder / f"{n}.err", back)) for n in range(len(commands))]


def environment(home: Path) -> dict[str, str]:
    """This process's, with a home of its own; what was compiled and fetched before is found if it was."""
    real = Path.home()
    given = {name: value for name, value in os.environ.items() if name != "XDG_STATE_HOME"}
    programs = home / "bin"
    programs.mkdir()
    (programs / "gpucr").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gpucr "$@"\n')
    (programs / "cuda-checkpoint").write_text(
        _DROP_IN.read_text().replace("#!python", f"#!{sys.executable}", 1)  # as installers do it
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    return {
        "XDG_CACHE_HOME": str(real / ".cache"),
        "XDG_DATA_HOME": str(real / ".local" / "share"),
        **given,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "GPUCR_SIM_FIXED_COST_MS": "5",
        "LD_LIBRARY_PATH": "",  # no driver until the page puts the simulated one in place
    }


def _lines(path: Path, back: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(_replaced(path.read_text() if path.exists() else "", back).splitlines())


def _replaced(text: str, instead: Mapping[str, str]) -> str:
    for old, new in instead.items():
        text = text.replace(old, new)
    return text


def stable(lines: Sequence[str]) -> list[str]:
    """The lines without what differs from run to run and from machine to machine: numbers, sizes, UUIDs, columns."""
    return [_stable(line) for line in lines]


def _stable(line: str) -> str:
    if line.startswith("kernel "):
        return "kernel"
    line = re.sub(rf"\b{re.escape(os.uname().nodename)}\b", "vm", line)
    line = re.sub(r"GPU-[0-9a-f-]+|\b[0-9a-f]{8}\b", "ID", line)
    line = re.sub(r"\d+(?:\.\d+)*", "#", line)
    line = re.sub(r"\b[KMGT]iB\b", "B", line)
    return " ".join(line.split())


def differences(typed: Typed, answer: Answer) -> list[str]:
    """Lines that the page shows and the command did not print, or vice versa.

    All of stdout must be on the page. Of stderr, what the page shows must have been said.
    """
    shown_talk = [line for line in typed.shown if _TALK.match(line)]
    shown = stable([line for line in typed.shown if not _TALK.match(line)])
    printed, said = stable(answer.stdout), stable(answer.stderr)
    found = [f"not said: {line}" for line in stable(shown_talk) if line not in said]
    if shown != printed:
        found += ["shown:", *shown, "printed:", *printed, "said:", *said]
    return found


if __name__ == "__main__":
    page = Path(sys.argv[1]).read_text()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "snapshots").mkdir()
        session = typed_in(page)
        answers = play([each.command for each in session], root / "home", {"/var/snapshots": f"{root}/snapshots"})
        for each, got in zip(session, answers, strict=True):
            sys.stdout.write("\n".join([f"# {each.command}", *got.stdout, *[f"  stderr: {s}" for s in got.stderr], ""]))
