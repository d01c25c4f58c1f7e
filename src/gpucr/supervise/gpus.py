"""Choose GPUs for a job if some of its own are missing or have failed. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpucr.errors import Unsupported
from gpucr.model import Gpu


def good_gpus(
    used: Sequence[Gpu], needed_bytes: Mapping[str, int], here: Sequence[Gpu], bad: Collection[str]
) -> str | None:
    """Comma-separated UUIDs of good GPUs for those that a job ``used``, in order. None: all its own are good.

    ``needed_bytes``: device memory by the UUIDs of ``used``; ``here``: the GPUs of this machine; ``bad``: UUIDs of
    failed ones. A good GPU of its own is kept. Raises Unsupported if too few of a model have room.
    """
    good = {gpu.uuid: gpu for gpu in here if gpu.uuid not in bad}
    if all(gpu.uuid in good for gpu in used):
        return None
    stay = {gpu.uuid for gpu in used if gpu.uuid in good}
    spare = [gpu for gpu in good.values() if gpu.uuid not in stay]
    chosen = []
    for gpu in used:
        if gpu.uuid in stay:
            chosen.append(gpu.uuid)
            continue
        fits = [s for s in spare if s.name == gpu.name and s.memory_free_bytes >= needed_bytes.get(gpu.uuid, 0)]
        if not fits:
            raise Unsupported(
                f"GPU {gpu.uuid} ({gpu.name}) is gone or has failed, and no other one of its model is free",
                hint="free one, repair it, or restore on another machine: gpucr restore STORE#NAME --gpu auto",
                code="GPUCR-NO-GPU",
            )
        spare.remove(fits[0])
        chosen.append(fits[0].uuid)
    return ",".join(chosen)
