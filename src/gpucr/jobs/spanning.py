"""Whether a command is one part of a job on several nodes: its launcher, or Slurm, says so."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from gpucr.quantities import whole_number

_COUNTS = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
"""The first that is set counts: a step may have fewer nodes than its job."""
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_OPTION = "--nnodes"


def why_several_nodes(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """What says that the job has parts on several nodes; None if nothing does."""
    for word, value in _options(command):
        if _most(value) > 1:
            return f"{word} {value}"
    for name in _COUNTS:
        if (count := environment.get(name)) is not None:
            return f"{name}={count}" if (whole_number(count) or 0) > 1 else None
    return None


def _options(command: Sequence[str]) -> list[tuple[str, str]]:
    """``--nnodes`` of a launcher in the command, with its value."""
    begin = next((place for place, word in enumerate(command) if word.rpartition("/")[2] in _LAUNCHERS), None)
    words = command[begin + 1 :] if begin is not None else ()
    found = [(_OPTION, value) for word, value in itertools.pairwise(words) if word == _OPTION]
    return found + [(_OPTION, word[len(_OPTION) + 1 :]) for word in words if word.startswith(f"{_OPTION}=")]


def _most(value: str) -> int:
    """Of ``2`` or ``1:4``."""
    return whole_number(value.rpartition(":")[2]) or 0
