"""What an ordinary user can do with a CUDA job of his own, and how long it takes. Run as root on a machine with a GPU.

    PYTHON tests/hardware/ordinary_user.py [--sandbox] [--mib N] [--uid N] [--json FILE]

PYTHON has gpucr, and the user must be able to read both (not below a closed /root). Root's helper listens.
With --sandbox the user's job is in a sandbox that it makes. The user, without any capability, and root, each in a
folder of their own: run, suspend, resume, freeze, thaw, dump, restore; after each the job must continue with its data.
Prints a table of
seconds. Exit code 1: something failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_S = 120.0
PASSED_ON = ("LD_LIBRARY_PATH", "GPUCR_SIM_GPUS", "GPUCR_SIM_FIXED_COST_MS")  # also on a simulated GPU
FREEZE = (
    "import sys, time, gpucr\n"
    "begin = time.perf_counter(); frozen = gpucr.freeze(int(sys.argv[1]))\n"
    "middle = time.perf_counter(); frozen.thaw()\n"
    "print(middle - begin, time.perf_counter() - middle)"
)


class Failed(Exception):
    """A step did not do what it should."""


class Actor:
    """Somebody who runs gpucr, in a home folder of their own."""

    def __init__(self, uid: int, port: int, mib: int, helper: Path, *, in_sandbox: bool) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="gpucr-ordinary-"))
        os.chown(self.home, uid, uid)
        drop = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups") if uid else ()
        self._prefix = (*drop, "env", "-C", str(self.home))
        self._environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self._environment |= {"HOME": str(self.home), "PATH": os.environ["PATH"]}
        self._environment["GPUCR_SIM_STATE"] = str(self.home / "simulated")
        if not uid:  # the folder of root's CRIU
            self._environment["XDG_DATA_HOME"] = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local/share")
        self._environment["GPUCR_HELPER"] = str(helper)
        self._isolation = "--isolate" if in_sandbox else "--no-isolate"
        self._port, self._mib, self._count = str(port), str(mib), 100
        self.pid = 0
        self.seconds: dict[str, float] = {}

    def run(self, *command: str) -> str:
        """A program, which must end with 0. Returns what it printed."""
        done = subprocess.run(
            [*self._prefix, *command], env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=LIMIT_S,
        )  # fmt: skip
        if done.returncode != 0:
            raise Failed(f"{' '.join(command[-6:])}: exit code {done.returncode}: {done.stderr.strip()[-400:]}")
        return done.stdout

    def gpucr(self, step: str, *arguments: str) -> str:
        """One command, timed as this step."""
        begin = time.perf_counter()
        printed = self.run(sys.executable, "-m", "gpucr", *arguments)
        self.seconds[step] = time.perf_counter() - begin
        return printed

    def session(self) -> None:
        """All steps."""
        counter = (sys.executable, "-m", "gpucr", "sim", "counter", "--port", self._port, "--mib", self._mib)
        self.gpucr("run", "run", "--name", "count", self._isolation, "--network", "host", "--", *counter)
        self._look()
        self._goes_on()
        for step, arguments in {
            "suspend": ("suspend", "count"),
            "resume": ("resume", "count"),
            "dump": ("dump", "count", "--to", "snapshot"),
            "restore": ("restore", "snapshot"),
        }.items():
            self.gpucr(step, *arguments)
            if step in ("resume", "restore"):
                self._look()
                self._goes_on()
        frozen_s, thawed_s = self.run(sys.executable, "-c", FREEZE, str(self.pid)).split()
        self.seconds |= {"freeze": float(frozen_s), "thaw": float(thawed_s)}
        self._goes_on()

    def _look(self) -> None:
        """In a new sandbox it has a new pid."""
        self.pid = json.loads(self.run(sys.executable, "-m", "gpucr", "jobs", "--json"))["jobs"][0]["pid"]

    def _goes_on(self) -> None:
        self._count += 1
        asked = ("sim", "ask", "--timeout", "60", self._port)
        answers = [self.run(sys.executable, "-m", "gpucr", *asked, text).strip() for text in ("inc", "verify")]
        if answers != [str(self._count), "ok"]:
            raise Failed(f"the job answered {answers}, not {self._count} and ok")

    def close(self) -> None:
        """End the job, and remove the folder."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def listening_helper() -> Iterator[Path]:
    """Root's helper, with keys of its own. Where it listens."""
    folder = Path(tempfile.mkdtemp(prefix="gpucr-helper-"))
    folder.chmod(0o755)
    places = [f"--{name}={folder / name}" for name in ("socket", "keys", "work")]
    with subprocess.Popen([sys.executable, "-m", "gpucr", "helper", "listen", *places]) as listener:
        try:
            until = time.monotonic() + LIMIT_S
            while not (folder / "socket").exists():
                if listener.poll() is not None or time.monotonic() > until:
                    raise Failed("the helper does not listen")
                time.sleep(0.05)
            yield folder / "socket"
        finally:
            listener.terminate()
    shutil.rmtree(folder)


def main() -> int:
    """Try all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandbox", action="store_true", help="the user's job in a sandbox that the helper makes")
    parser.add_argument("--mib", type=int, default=4096, help="device memory of the job")
    parser.add_argument("--uid", type=int, default=4001)
    parser.add_argument("--json", type=Path, help="write the seconds here, too")
    options = parser.parse_args()
    seconds: dict[str, dict[str, float]] = {}
    problems = []
    with listening_helper() as helper:
        for who, uid, port in (("user", options.uid, 7411), ("root", 0, 7412)):
            actor = Actor(uid, port, options.mib, helper, in_sandbox=options.sandbox and uid != 0)
            try:
                actor.session()
            except (Failed, subprocess.TimeoutExpired, LookupError, ValueError) as e:
                problems.append(f"{who}: {e}")
            finally:
                actor.close()
            seconds[who] = actor.seconds
    for step in seconds["root"] | seconds["user"]:
        cells = [f"{seconds[who][step]:8.2f}" if step in seconds[who] else "       -" for who in ("user", "root")]
        print(f"{step:10}{cells[0]} s as user{cells[1]} s as root")
    print("\n".join(problems) or "all steps succeeded")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "problems": problems}, indent=1))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
