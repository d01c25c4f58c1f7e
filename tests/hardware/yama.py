"""What an ordinary user's gpucr can do under each kernel.yama.ptrace_scope. Run as root if the kernel has Yama.

    python3 -m tests.hardware.yama [--scopes 0,1,2] [--json FILE]

No GPU is needed: the simulated driver stands in. Where the machine's own kernel has no Yama, user-mode Linux has one
(Debian's package user-mode-linux): `linux.uml mem=2500M rootfstype=hostfs rootflags=/ rw init=SCRIPT`, with a SCRIPT
that mounts /proc, and file systems in memory at /tmp and /run, brings up `lo`, and runs this.

For a job with the interposer and one without: whether it can be traced, frozen (also if gpucr is killed meanwhile),
suspended and resumed; after each the job must continue with its data, and be as closed as before. The machine's own
value is put back (3 cannot be lowered: it is not tried unless named). Exit code 1: something is not as expected.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gpucr.linux.tracing import PTRACE_SCOPE
from tests.counter import wait_until
from tests.ordinary_user import OrdinaryUser, ordinary_user

LOOK = """
import sys
from gpucr.interposer.client import ask_status
from gpucr.linux import tracing
status = ask_status(int(sys.argv[1]))
print(tracing.is_allowed(int(sys.argv[1])), bool(status and status.traceable))
"""
FREEZE = "import sys, gpucr\ngpucr.freeze(int(sys.argv[1])).thaw()\n"
KILLED = "import os, sys, gpucr\nfrozen = gpucr.freeze(int(sys.argv[1]))\nos.kill(os.getpid(), 9)\n"


def _look(user: OrdinaryUser, pid: int) -> tuple[bool, bool]:
    """Whether another process of the user may trace this one, and whether its agent has opened it."""
    done = user.run(sys.executable, "-c", LOOK, str(pid))
    allowed, is_open = done.stdout.split()
    return allowed == "True", is_open == "True"


def try_scope(user: OrdinaryUser, name: str, port: str, scope: int) -> dict[str, object]:
    """One row of the table."""
    pid = user.pid_of(name)
    before = _look(user, pid)
    frozen = user.run(sys.executable, "-c", FREEZE, str(pid))
    row: dict[str, object] = {"scope": scope, "job": name, "traced": before[0], "freeze": frozen.returncode == 0}
    if frozen.returncode == 0:
        user.run(sys.executable, "-c", KILLED, str(pid))
        wait_until(lambda: not _look(user, pid)[1], "the guard to close it")
        asked = user.gpucr("sim", "ask", port, "verify")
        row["thawed by the guard"] = asked.stdout == "ok\n"
    else:
        row["names the setting"] = f"kernel.yama.ptrace_scope is {scope}" in frozen.stderr
    row["suspend"] = all(user.gpucr(what, name).returncode == 0 for what in ("suspend", "resume"))
    row["as before"] = _look(user, pid) == before and user.gpucr("sim", "ask", port, "verify").stdout == "ok\n"
    return row


def expected(name: str, scope: int) -> dict[str, object]:
    """What the row has to be."""
    can_freeze = scope == 0 or (scope == 1 and name == "interposed")
    detail = {"thawed by the guard": True} if can_freeze else {"names the setting": True}
    first = {"scope": scope, "job": name, "traced": scope == 0, "freeze": can_freeze}
    return {**first, **detail, "suspend": True, "as before": True}


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scopes", default="0,1,2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not PTRACE_SCOPE.exists():
        sys.exit("this kernel has no Yama")
    own, rows, is_right = PTRACE_SCOPE.read_text(), [], True
    with ordinary_user() as user:
        try:
            for name, more, port in (("plain", (), "7801"), ("interposed", ("--interpose",), "7802")):
                program = [sys.executable, "-m", "gpucr", "sim", "counter", "--port", port, "--mib", "8"]
                user.succeeds("run", *more, "--name", name, "--", *program)
                user.succeeds("sim", "ask", port, "verify")
            for scope in map(int, options.scopes.split(",")):
                PTRACE_SCOPE.write_text(f"{scope}\n")
                for name, port in (("plain", "7801"), ("interposed", "7802")):
                    row = try_scope(user, name, port, scope)
                    is_right &= row == expected(name, scope)
                    rows.append(row)
                    print("  ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
        finally:
            if PTRACE_SCOPE.read_text() != "3\n":
                PTRACE_SCOPE.write_text(own)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    print("as expected" if is_right else "NOT as expected")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
