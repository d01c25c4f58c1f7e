"""The interposer, compiled once for all tests and kept beside the simulator: a compiler takes seconds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from gpucr.interposer.build import LIBRARY, build_digest, compile_library
from gpucr.sim import build as simulator


def compiled_interposer() -> Path:
    """The library. Processes may compile it concurrently: the first to finish installs it."""
    folder = simulator.build().parent / f"interposer-{build_digest()}"
    if not folder.exists():
        work = Path(tempfile.mkdtemp(prefix="build-", dir=folder.parent))
        try:
            compile_library(work)
            work.rename(folder)
        except OSError:
            if not (folder / LIBRARY).exists():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder / LIBRARY


def data_home() -> Path:
    """For XDG_DATA_HOME: where the first `gpucr run` installs its interposer and later ones find it."""
    return simulator.build().parent / "data-home"
