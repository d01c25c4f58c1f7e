"""Who may do what to a CUDA process? Run as root on a machine with a GPU.

    python3 tests/hardware/privileges.py [--json FILE]

Needs setpriv (util-linux) and a Python 3.10 that an ordinary user can start. Small CUDA processes of one user are acted
on by root, with and without CAP_SYS_PTRACE, by their owner (beside them, as their parent, with a grant by
PR_SET_PTRACER), by another user, and by another user who has CAP_SYS_PTRACE: each of the driver's six actions, and what
the kernel allows beside. Everything is repeated for each value of kernel.yama.ptrace_scope that can be set. Prints a
table. Exit code 1: a process that was acted on does not continue.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OWNER, OTHER = 4001, 4002
LIMIT_S = 60.0
PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or sys.executable
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
EXPECTED = str(7 * 1000)
"""What a target answers while its device memory is whole."""


@dataclass(frozen=True)
class Case:
    """Who acts on what."""

    name: str
    actor: tuple[str, ...]
    target: tuple[str, ...] = ()
    is_parent: bool = False


@dataclass
class Result:
    """What was seen, and whether the target continues."""

    case: str
    scope: str
    seen: dict[str, object] = field(default_factory=dict)
    problem: str = ""


def as_user(uid: int, *options: str) -> tuple[str, ...]:
    """A command prefix that runs the rest as this user."""
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *options)


PTRACE = ("--inh-caps=+sys_ptrace", "--ambient-caps=+sys_ptrace")
WITHOUT = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
UNDUMPABLE = ("--undumpable",)

CASES = (
    Case("root", ()),
    Case("root, undumpable target", (), UNDUMPABLE),
    Case("root without CAP_SYS_PTRACE", WITHOUT),
    Case("root without CAP_SYS_PTRACE, undumpable target", WITHOUT, UNDUMPABLE),
    Case("owner, beside it", as_user(OWNER)),
    Case("owner, its parent", as_user(OWNER), is_parent=True),
    Case("owner, granted by PR_SET_PTRACER", as_user(OWNER), ("--grant", "any")),
    Case("owner, undumpable target", as_user(OWNER), UNDUMPABLE),
    Case("owner, its parent, undumpable target", as_user(OWNER), UNDUMPABLE, is_parent=True),
    Case("owner with CAP_SYS_PTRACE, undumpable target", as_user(OWNER, *PTRACE), UNDUMPABLE),
    Case("another user", as_user(OTHER)),
    Case("another user, granted by PR_SET_PTRACER", as_user(OTHER), ("--grant", "any")),
    Case("another user with CAP_SYS_PTRACE", as_user(OTHER, *PTRACE)),
)


@contextlib.contextmanager
def target_of_owner(programs: Path, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process of OWNER that uses the GPU."""
    command = [*as_user(OWNER), PYTHON, str(programs / "target.py"), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("ready"):
                raise RuntimeError(f"the target did not start: {line!r}")
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str]) -> str:
    """The target's answer: EXPECTED while its memory is whole."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def run(case: Case, scope: str, programs: Path) -> Result:
    """One case."""
    result = Result(case.name, scope)
    actor = [*case.actor, PYTHON, str(programs / "actor.py")]
    try:
        if case.is_parent:
            done = _act([*actor, "--child", *case.target])
            answer = str(done.pop("continues", "nothing"))
            result.seen = done
        else:
            with target_of_owner(programs, case.target) as target:
                result.seen = _act([*actor, str(target.pid)])
                answer = ask(target)
        if answer != EXPECTED:
            result.problem = f"the target answered {answer!r}"
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as e:
        result.problem = str(e)
    return result


def _act(command: list[str]) -> dict[str, object]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"the actor ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def scopes() -> Iterator[str]:
    """The values of ptrace_scope to try, each while it is set; the machine's own is put back."""
    if not YAMA.exists():
        yield "no Yama"
        return
    before = YAMA.read_text().strip()
    try:
        for value in ("0", "1", "2"):
            with contextlib.suppress(OSError):
                YAMA.write_text(value)
            if YAMA.read_text().strip() == value:
                yield value
    finally:
        with contextlib.suppress(OSError):
            YAMA.write_text(before)


def show(results: Sequence[Result]) -> None:
    """A table: a case a row."""
    for scope in dict.fromkeys(result.scope for result in results):
        print(f"\nptrace_scope: {scope}")
        for result in results:
            if result.scope == scope:
                seen = ", ".join(f"{what} {how}" for what, how in result.seen.items() if how != "yes")
                allowed = sum(how == "yes" for how in result.seen.values())
                text = f"{allowed} of {len(result.seen)} allowed" + (f"; not: {seen}" if seen else "")
                print(f"  {result.case:52} {text}{'  PROBLEM: ' + result.problem if result.problem else ''}")


def main() -> int:
    """Try all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything here, too")
    options = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder)
        programs.chmod(0o755)
        for name in ("target.py", "actor.py"):
            shutil.copy(Path(__file__).parent / "privileges" / name, programs / name)
            (programs / name).chmod(0o644)
        for scope in scopes():
            results += [run(case, scope, programs) for case in CASES]
    show(results)
    if options.json:
        options.json.write_text(json.dumps([vars(result) for result in results], indent=1))
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main())
