"""Our structs and constants against cuda-bindings, which is generated from NVIDIA's cuda.h."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from gpucr.driver import libcuda
from gpucr.model import CudaState

bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

STRUCTS = [
    ("CUcheckpointGpuPair", libcuda.GpuPair),
    ("CUcheckpointLockArgs", libcuda.LockArgs),
    ("CUcheckpointCheckpointArgs", libcuda.CheckpointArgs),
    ("CUcheckpointRestoreArgs", libcuda.RestoreArgs),
    ("CUcheckpointUnlockArgs", libcuda.UnlockArgs),
]
OLD, NEW = bytes(range(16)), bytes(range(0xF0, 0x100))


@pytest.mark.parametrize(("name", "ours"), STRUCTS)
def test_size(name: str, ours: type[ctypes.Structure]) -> None:
    assert ctypes.sizeof(ours) == bindings.sizeof(getattr(bindings, name))


def test_lock_args_fields() -> None:
    theirs = bindings.CUcheckpointLockArgs()
    theirs.timeoutMs = 0x89ABCDEF
    assert libcuda.LockArgs.from_address(theirs.getPtr()).timeoutMs == 0x89ABCDEF


def _pair() -> Any:
    pair = bindings.CUcheckpointGpuPair()
    for field, raw in (("oldUuid", OLD), ("newUuid", NEW)):
        uuid = bindings.CUuuid()
        ctypes.memmove(uuid.getPtr(), raw, len(raw))
        setattr(pair, field, uuid)
    return pair


def test_gpu_pair_fields() -> None:
    theirs = _pair()
    ours = libcuda.GpuPair.from_address(theirs.getPtr())
    assert (bytes(ours.oldUuid), bytes(ours.newUuid)) == (OLD, NEW)


def test_restore_args_fields() -> None:
    theirs = bindings.CUcheckpointRestoreArgs()
    theirs.gpuPairs = [_pair()]
    theirs.gpuPairsCount = 1
    ours = libcuda.RestoreArgs.from_address(theirs.getPtr())
    assert ours.gpuPairsCount == 1
    assert bytes(ours.gpuPairs[0].newUuid) == NEW


@pytest.mark.parametrize(
    ("name", "ours"),
    [("CUcheckpointCheckpointArgs", libcuda.CheckpointArgs), ("CUcheckpointRestoreArgs", libcuda.RestoreArgs)],
)
def test_custom_storage_field(name: str, ours: Any) -> None:
    theirs = getattr(bindings, name)()
    if not hasattr(theirs, "customStorageInfo_out"):
        pytest.skip("this cuda-bindings is older than API 13.4")
    theirs.customStorageInfo_out = 0x1234_5678_9ABC
    assert ours.from_address(theirs.getPtr()).customStorageInfo_out == 0x1234_5678_9ABC


RESULTS = {
    "CUDA_SUCCESS": libcuda.SUCCESS,
    "CUDA_ERROR_INVALID_VALUE": libcuda.INVALID_VALUE,
    "CUDA_ERROR_OUT_OF_MEMORY": libcuda.OUT_OF_MEMORY,
    "CUDA_ERROR_NOT_INITIALIZED": libcuda.NOT_INITIALIZED,
    "CUDA_ERROR_NO_DEVICE": libcuda.NO_DEVICE,
    "CUDA_ERROR_OPERATING_SYSTEM": libcuda.OPERATING_SYSTEM,
    "CUDA_ERROR_ILLEGAL_STATE": libcuda.ILLEGAL_STATE,
    "CUDA_ERROR_NOT_READY": libcuda.NOT_READY,
    "CUDA_ERROR_NOT_PERMITTED": libcuda.NOT_PERMITTED,
    "CUDA_ERROR_NOT_SUPPORTED": libcuda.NOT_SUPPORTED,
    "CUDA_ERROR_UNKNOWN": libcuda.UNKNOWN,
}


@pytest.mark.parametrize(("name", "value"), RESULTS.items())
def test_result_codes(name: str, value: int) -> None:
    assert value == int(getattr(bindings.CUresult, name))


def test_state_words_match_cuda_h() -> None:
    theirs = {int(state): state.name.removeprefix("CU_PROCESS_STATE_").lower() for state in bindings.CUprocessState}
    # Bindings older than API 13.4 know only the first four.
    assert {value: libcuda.STATE_WORDS[value] for value in theirs} == theirs
    assert tuple(state.word for state in CudaState) == libcuda.STATE_WORDS
