"""Jobs with CUDA that look for OpenCL devices come back, and those that use OpenCL are refused. Run as root.

    python3 tests/hardware/opencl.py [--mib MIB]

A job that only looked is dumped and restored three times, and once more left running: its CUDA memory must be right,
and OpenCL answer with an error. One that has made a context must be refused, with its interposer and without,
and work on. Full GPUs: below `tests/hardware/filled.py`. Exit code 1: something is not as expected.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "opencl.py"
RIGHT = f"0 {7 << 20}"
LIMIT_S = 60.0


def gpucr(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    command = [sys.executable, "-m", "gpucr", *map(str, arguments)]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as e:
        said = (e.stderr or b"").decode(errors="replace").strip().rpartition("\n")[2]
        return subprocess.CompletedProcess(command, 124, "", f"nothing for {LIMIT_S:g} s after: {said}")


class Job:
    """One job of the program, in a folder of its own."""

    def __init__(self, folder: Path, mib: int, *options: str) -> None:
        self.folder, self.name = folder, folder.name
        self._asked = 0
        folder.mkdir()
        done = gpucr("run", "--name", self.name, *options, "--", sys.executable, PROGRAM, folder, mib)
        assert done.returncode == 0, done.stderr
        self._wait(folder / "ready")

    def _wait(self, file: Path) -> None:
        end = time.monotonic() + LIMIT_S
        while not file.exists():
            assert time.monotonic() < end, f"{file.name} does not come"
            time.sleep(0.01)

    def ask(self, what: str = "") -> str:
        """What it says: the result of a CUDA copy, a sum, that of OpenCL, and that of a context if it made one."""
        number, self._asked = self._asked, self._asked + 1
        (self.folder / "question").write_text(what)
        (self.folder / "question").rename(self.folder / f"ask-{number}")
        said = self.folder / f"say-{number}"
        self._wait(said)
        return said.read_text()

    def end(self) -> None:
        """Kill it."""
        gpucr("kill", self.name)


def main() -> int:
    """Print a line for each thing tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    options = parser.parse_args()
    top = Path(tempfile.mkdtemp(prefix="opencl-"))
    is_right = True

    def tell(what: str, said: str, is_expected: bool) -> None:
        nonlocal is_right
        is_right &= is_expected
        print(f"{what:42}  {said:40}  {'' if is_expected else 'NOT AS EXPECTED'}", flush=True)

    try:
        job = Job(top / "looked", options.mib)
        tell("looked", said := job.ask(), said == f"{RIGHT} 0")
        for turn in range(3):
            done = gpucr("dump", job.name, "--to", top / f"s{turn}")
            tell(f"dump {turn + 1}", done.stderr.partition("\n")[0][:60], done.returncode == 0)
            done = gpucr("restore", top / f"s{turn}")
            tell(f"restore {turn + 1}", done.stderr.partition("\n")[0][:60], done.returncode == 0)
            said = job.ask("context")
            fails = said.startswith(RIGHT) and "0" not in said.split()[2:]
            tell("CUDA is right, OpenCL gives errors", said, fails)
        job.end()
        job = Job(top / "left-running", options.mib)
        done = gpucr("dump", job.name, "--to", top / "left", "--leave-running")
        said = job.ask("context")
        fails = said.startswith(RIGHT) and "0" not in said.split()[2:]
        tell("left running", said, done.returncode == 0 and fails)
        job.end()
        for name, more in (("interposed", ()), ("plain", ("--no-interpose",))):
            job = Job(top / name, options.mib, *more)
            tell(f"{name}: context", said := job.ask("context"), said == f"{RIGHT} 0 0")
            for turn in range(3):
                done = gpucr("dump", job.name, "--to", top / f"{name}-{turn}")
                refused = done.returncode == 3 and "GPUCR-OPENCL" in done.stderr
                tell(f"{name}: dump {turn + 1} is refused", done.stderr.partition("\n")[0][:60], refused)
                tell(f"{name}: works on", said := job.ask(), said == f"{RIGHT} 0")
            job.end()
    finally:
        shutil.rmtree(top, ignore_errors=True)
    print("as expected" if is_right else "NOT as expected")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
