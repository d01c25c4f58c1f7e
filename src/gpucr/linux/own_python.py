"""A second Python process that runs a part of gpucr, and the environment of what gpucr starts for itself."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

# Not `-m`: that would look for modules in the working folder first. The search path is ours instead, which also holds
# where gpucr is called from a program that has set it up in its own way.
_BOOTSTRAP = (
    "import sys, importlib; count = int(sys.argv[2]); sys.path[:] = sys.argv[3 + count:]; "
    "importlib.import_module(sys.argv[1]).main(*sys.argv[3:3 + count])"
)


# What gpucr's own processes and CRIU may need. A keeper lives as long as its job, and can be looked at from inside.
_PASSED_ON = re.compile(r"PATH|HOME|TMPDIR|TZ|LANG|LANGUAGE|(?:LC|LD|XDG|CUDA|NVIDIA|GPUCR)_\w+")
_PASSPHRASE = "GPUCR_PASSPHRASE"  # noqa: S105 - the name of a variable


def environment() -> dict[str, str]:
    """What a process of gpucr's own, or CRIU, gets of this one's environment: nothing that could open a store."""
    return {name: value for name, value in without_passphrase(os.environ).items() if _PASSED_ON.fullmatch(name)}


def without_passphrase(variables: Mapping[str, str]) -> dict[str, str]:
    """These variables without the passphrase of stores, which is gpucr's alone."""
    return {name: value for name, value in variables.items() if name != _PASSPHRASE}


def command(module: str, *arguments: object) -> list[str]:
    """The arguments of a Python process that calls ``main`` of a module of gpucr, with these arguments as text.

    It runs without site-packages' start-up files and without the caller's PYTHON* variables.
    """
    source = str(Path(__file__).parents[2])
    path = [source, *(entry for entry in sys.path if os.path.isabs(entry) and entry != source)]
    words = [str(argument) for argument in arguments]
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, module, str(len(words)), *words, *path]
