"""Run one canary. It says ``ready``, and ``right`` to every line that it reads, until its input ends.

Text after a colon is for people: ``impossible: needs 2 GPUs``, ``failed: ...``, ``wrong: ...``.
"""

from __future__ import annotations

import os
import sys
from typing import Protocol

from gpucr.diagnosis.canaries.programs.cuda import CudaFailed, Impossible
from gpucr.diagnosis.canaries.programs.data import Wrong
from gpucr.diagnosis.canaries.programs.pairs import LegacyIpc, SharedMemoryRanks, VmmExport, end_with_parent
from gpucr.diagnosis.canaries.programs.single import Managed, PeerAccess, Pinned, Plain, StreamsAndGraphs


class _Canary(Protocol):
    def check(self) -> None: ...


_CANARIES: dict[str, type[_Canary]] = {
    "plain": Plain,
    "streams_and_graphs": StreamsAndGraphs,
    "pinned": Pinned,
    "managed": Managed,
    "peer_access": PeerAccess,
    "legacy_ipc": LegacyIpc,
    "vmm_export": VmmExport,
    "shared_memory_ranks": SharedMemoryRanks,
    "interposer": Plain,
    "custom_storage": Plain,
}


def _say(text: str) -> None:
    os.write(1, text.replace("\n", " ").encode() + b"\n")


def _run(name: str) -> None:
    try:
        canary = _CANARIES[name]()
        canary.check()
    except Impossible as e:
        _say(f"impossible: {e}")
        return
    except (CudaFailed, Wrong, OSError) as e:
        _say(f"failed: {e}")
        return
    _say("ready")
    for _ in sys.stdin:
        try:
            canary.check()
        except (CudaFailed, Wrong, OSError) as e:
            _say(f"wrong: {e}")
        else:
            _say("right")


if __name__ == "__main__":
    end_with_parent()
    _run(sys.argv[1])
    os._exit(0)  # skip a teardown that could hang
