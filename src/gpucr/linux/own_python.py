"""Python processes that run parts of gpucr, and the environment of gpucr's own child processes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

# Not `-m`, which would search the working folder first. Passing our own search path also works if gpucr is called from
# a program that has changed sys.path.
_BOOTSTRAP = (
    "import sys, importlib; count = int(sys.argv[2]); sys.path[:] = sys.argv[3 + count:]; "
    "importlib.import_module(sys.argv[1]).main(*sys.argv[3:3 + count])"
)


# What gpucr's own processes and CRIU may need. Keep it small: a keeper lives as long as its job, which may read it.
_PASSED_ON = re.compile(r"PATH|HOME|TMPDIR|TZ|LANG|LANGUAGE|(?:LC|LD|XDG|CUDA|NVIDIA|GPUCR)_\w+")
_PASSPHRASE = "GPUCR_PASSPHRASE"  # noqa: S105 - the name of a variable


def environment() -> dict[str, str]:
    """The environment for gpucr's own processes and CRIU: nothing that could open a store."""
    return {name: value for name, value in without_passphrase(os.environ).items() if _PASSED_ON.fullmatch(name)}


def without_passphrase(variables: Mapping[str, str]) -> dict[str, str]:
    """These variables without the stores' passphrase, which only gpucr may see."""
    return {name: value for name, value in variables.items() if name != _PASSPHRASE}


def command(module: str, *arguments: object) -> list[str]:
    """The command line of a Python process that calls ``main`` of a gpucr module with these arguments.

    It ignores site-packages' start-up files and the caller's PYTHON* variables.
    """
    source = str(Path(__file__).parents[2])
    path = [source, *(entry for entry in sys.path if os.path.isabs(entry) and entry != source)]
    words = [str(argument) for argument in arguments]
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, module, str(len(words)), *words, *path]
