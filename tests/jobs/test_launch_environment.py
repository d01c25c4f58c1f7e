"""What gpucr sets in a job's environment: only what this driver needs, and nothing that the user has set."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpucr.jobs.environment import EnvironmentChange, changed, choose_environment
from gpucr.jobs.spanning import why_several_nodes

NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
TORCH = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def _choose(
    driver_version: str | None = "580.159.04",
    *,
    given: Mapping[str, str] | None = None,
    comes_back: Mapping[str, bool] | None = None,
    io_uring_is_refused: bool = True,
    interposed: bool = False,
    several_nodes: bool = False,
) -> dict[str, EnvironmentChange]:
    changes = choose_environment(
        given or {},
        driver_version=driver_version,
        comes_back=comes_back or {},
        io_uring_is_refused=io_uring_is_refused,
        interposed=interposed,
        several_nodes=several_nodes,
    )
    assert all(change.reason and change.consequence for change in changes)
    return {change.variable: change for change in changes}


def _values(changes: Mapping[str, EnvironmentChange]) -> dict[str, str]:
    return {name: change.value for name, change in changes.items()}


def test_settings_measured_to_be_restored_on_driver_580() -> None:
    assert _values(_choose("580.159.04")) == NCCL | TORCH


def test_settings_interposers_restore_are_left_to_nccl() -> None:
    assert _values(_choose(interposed=True)) == {"NCCL_NVLS_ENABLE": "0"} | TORCH


def test_between_nodes_nccl_uses_sockets() -> None:
    chosen = _values(_choose(interposed=True, several_nodes=True))
    assert chosen == {"NCCL_NVLS_ENABLE": "0", "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"} | TORCH


@pytest.mark.parametrize(
    ("command", "environment", "why"),
    [
        ("python train.py --nnodes 2", {}, None),
        ("torchrun --nnodes 2 train.py", {}, "--nnodes 2"),
        ("/opt/bin/torchrun --nnodes=1:4 train.py", {"SLURM_NNODES": "1"}, "--nnodes 1:4"),
        ("torchrun --nnodes 1 train.py", {}, None),
        ("torchrun --standalone train.py", {}, None),
        ("python -m torch.distributed.run --nnodes 2 train.py", {}, "--nnodes 2"),
        ("torchrun --nnodes $N train.py", {}, None),
        ("python train.py", {"SLURM_NNODES": "2"}, "SLURM_NNODES=2"),
        ("python train.py", {"SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1"}, None),
        ("python train.py", {"SLURM_NNODES": "1"}, None),
    ],
)
def test_jobs_on_several_nodes(command: str, environment: dict[str, str], why: str | None) -> None:
    assert why_several_nodes(command.split(), environment) == why


def test_without_a_driver_nothing_is_set() -> None:
    assert _choose(None) == {}


def test_results_are_not_carried_over_to_a_newer_driver() -> None:
    newer = _choose("610.10")
    assert _values(newer) == NCCL | TORCH
    assert "has not been tried on this machine" in newer["NCCL_P2P_DISABLE"].reason
    assert "driver 580.1 does not bring it back" in _choose("580.1")["NCCL_P2P_DISABLE"].reason


@pytest.mark.parametrize("driver", ["580.159.04", "610.10"])
def test_peer_memory_measured_to_be_restored_is_allowed(driver: str) -> None:
    tried = {"peer_access": True, "legacy_ipc": True}
    chosen = _values(_choose(driver, comes_back=tried))
    assert chosen == {name: value for name, value in (NCCL | TORCH).items() if name != "NCCL_P2P_DISABLE"}


@pytest.mark.parametrize("tried", [{"peer_access": True, "legacy_ipc": False}, {"legacy_ipc": True}])
def test_peer_memory_needs_both_canaries_restored(tried: Mapping[str, bool]) -> None:
    assert "NCCL_P2P_DISABLE" in _choose("580.159.04", comes_back=tried)


def test_vmm_memory_measured_to_be_restored_is_allowed_without_multicast() -> None:
    chosen = _values(_choose("620.1", comes_back={"vmm_export": True, "peer_access": True, "legacy_ipc": True}))
    assert chosen == {"NCCL_NVLS_ENABLE": "0"} | TORCH


def test_vmm_memory_measured_to_be_lost_is_reported() -> None:
    change = _choose("620.1", comes_back={"vmm_export": False})["NCCL_CUMEM_ENABLE"]
    assert "did not come back when it was tried on this machine" in change.reason


def test_libuv_is_configured_only_where_io_uring_cannot_be_denied() -> None:
    assert "USE_LIBUV" not in _choose(io_uring_is_refused=True)
    assert _choose(None, io_uring_is_refused=False)["USE_LIBUV"].value == "0"


def test_user_settings_are_kept() -> None:
    given = {"NCCL_P2P_DISABLE": "0", "NCCL_CUMEM_ENABLE": "0", "PATH": "/bin"}
    changes = _choose(given=given)
    assert not changes["NCCL_P2P_DISABLE"].is_set
    assert changes["NCCL_P2P_DISABLE"].is_harmful
    assert not changes["NCCL_CUMEM_ENABLE"].is_set
    assert not changes["NCCL_CUMEM_ENABLE"].is_harmful
    assert changes["NCCL_CUMEM_HOST_ENABLE"].is_set
    environment = changed(given, tuple(changes.values()))
    assert environment == {**given, **{name: value for name, value in (NCCL | TORCH).items() if name not in given}}


@pytest.mark.parametrize("version", ["", "unknown", "²", "."])
def test_an_unreadable_version_counts_as_old(version: str) -> None:
    assert _values(_choose(version)) == NCCL | TORCH
