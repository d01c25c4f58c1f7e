"""A job's allocation, as the batch system describes it: its id, its GPUs, its end."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucr.batch.time_limit import end_of_place
from gpucr.errors import InvalidRequest
from gpucr.quantities import whole_number

_PREFIXES = ("SLURM_", "_CONDOR_", "PBS_", "LSB_", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_NOT_OF_SRUN = 0xFFFF_FFF0  # the batch script's own step, and other special ones, have the largest numbers
_MOST_CHARACTERS = 1 << 20
_OF_CONDOR = re.compile(r"^(ClusterId|ProcId|NumShadowStarts) *= *([0-9]{1,15})$", re.MULTILINE)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Allocation:
    """An allocation for one job. ``end_s``: when it ends (time.time()); ``gpus``: as in CUDA_VISIBLE_DEVICES.

    ``is_first``: the job's first allocation, if the batch system tells. ``scratch``: a folder of this allocation only;
    HTCondor copies there what the job left in its last one, and takes away what the submit file lists.
    """

    id: str
    gpus: str | None
    end_s: float | None
    variables: Mapping[str, str]
    is_first: bool = True
    scratch: Path | None = None

    @classmethod
    def of(
        cls,
        environment: Mapping[str, str],
        given_id: str | None = None,
        *,
        one_job: bool = False,
        asks_slurm: bool = True,
    ) -> Allocation:
        """Read the environment, and ask Slurm what it does not tell. Raises InvalidRequest if there is no usable id.

        ``one_job``: all tasks of a step have the same id.
        """
        condor = _numbers_of_condor(environment)
        found = given_id or _id_in(environment, condor, one_job=one_job)
        if found is None:
            raise InvalidRequest(
                "no batch system has started this, so the job has no id",
                hint="give one with --id: the snapshots of the job are found by it",
                code="GPUCR-BATCH-ID",
            )
        if not _ID.fullmatch(found):
            raise InvalidRequest(
                f"{found!r} cannot be the id of a job",
                hint="give --id with at most 64 letters, digits, dots, dashes and underscores",
                code="GPUCR-BATCH-ID",
            )
        return cls(
            found,
            environment.get("CUDA_VISIBLE_DEVICES") or None,
            end_of_place(environment) if asks_slurm else None,
            {name: value for name, value in environment.items() if name.startswith(_PREFIXES)},
            environment.get("SLURM_RESTART_COUNT", "0") == "0" and condor.get("NumShadowStarts", 1) <= 1,
            Path(scratch).resolve() if (scratch := environment.get("_CONDOR_SCRATCH_DIR")) else None,
        )

    def has_alone(self, path: str | Path) -> bool:
        """Whether a path, which may also be a URL, is in this allocation's scratch folder."""
        return (
            self.scratch is not None
            and "://" not in str(path)
            and self.scratch in (where := Path(path).resolve(), *where.parents)
        )

    def as_shell(self) -> str:
        """Read the batch system's variables from a file, like a shell."""
        return "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(self.variables.items()))


def _numbers_of_condor(environment: Mapping[str, str]) -> dict[str, int]:
    """HTCondor's job data, in a file and not in the environment (seen with 23.9.6)."""
    path = environment.get("_CONDOR_JOB_AD")
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_CHARACTERS)
    except OSError:
        return {}
    return {name: int(number) for name, number in _OF_CONDOR.findall(text)}


def _id_in(environment: Mapping[str, str], condor: Mapping[str, int], *, one_job: bool) -> str | None:
    """Slurm keeps a requeued job's id; an array has one per task, `srun` a step per command.

    Several processes of a step are distinguished by rank, unless they are one job.
    """
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        job = f"slurm-{array}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    elif single := environment.get("SLURM_JOB_ID"):
        job = f"slurm-{single}"
    elif "ClusterId" in condor and "ProcId" in condor:
        return f"condor-{condor['ClusterId']}.{condor['ProcId']}"
    else:
        return None
    step = environment.get("SLURM_STEP_ID", "")
    number = whole_number(step)
    if number is None or number >= _NOT_OF_SRUN:
        return job
    are_several = not one_job and environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    rank = environment.get("SLURM_PROCID", "0") if are_several else None
    return f"{job}.{step}" if rank is None else f"{job}.{step}.{rank}"
