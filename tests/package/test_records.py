"""Records are read by several threads at once; the rest of `gpucr.records` is held by the tests of what is read."""

from __future__ import annotations

import subprocess
import sys

FIRST_USES = """
import sys, threading, types
from gpucr import records
sys.setswitchinterval(1e-6)
fields = "".join(f"    f{each}: 'tuple[Annotated[int, msgspec.Meta(ge=0)], ...]' = ()\\n" for each in range(8))
source = "import msgspec\\nfrom typing import Annotated\\n"
for depth in range(12):
    source += f"class S{depth}(msgspec.Struct, frozen=True):\\n{fields}"
    source += f"    below: 'S{depth - 1} | None' = None\\n" if depth else ""
value = {f"f{each}": [] for each in range(8)} | {"below": None}
for number in range(40):
    module = types.ModuleType(f"made{number}")
    sys.modules[module.__name__] = module
    exec(source, module.__dict__)
    together = threading.Barrier(6)
    def use():
        together.wait()
        records.convert(value, module.S11)
    threads = [threading.Thread(target=use) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""


def test_a_type_first_used_by_several_threads_at_once() -> None:
    """With nothing but msgspec.convert this crashes at nearly every run."""
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
