"""A second Python process that runs a part of gpucr."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Not `-m`: that would look for modules in the working folder first. The search path is ours instead, which also holds
# where gpucr is called from a program that has set it up in its own way.
_BOOTSTRAP = (
    "import sys, importlib; count = int(sys.argv[2]); sys.path[:] = sys.argv[3 + count:]; "
    "importlib.import_module(sys.argv[1]).main(*sys.argv[3:3 + count])"
)


def command(module: str, *arguments: object) -> list[str]:
    """The arguments of a Python process that calls ``main`` of a module of gpucr, with these arguments as text.

    It runs without site-packages' start-up files and without the caller's PYTHON* variables.
    """
    source = str(Path(__file__).parents[2])
    path = [source, *(entry for entry in sys.path if os.path.isabs(entry) and entry != source)]
    words = [str(argument) for argument in arguments]
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, module, str(len(words)), *words, *path]
