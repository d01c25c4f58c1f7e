"""Communication with other machines that no snapshot has."""

from __future__ import annotations

import os

import pytest

from gpucr.diagnosis.preflight import between_nodes
from gpucr.linux import processes
from gpucr.linux.processes import OpenFile
from gpucr.model import Job


def test_rdma_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job((processes.describe(os.getpid()),), (), ())
    assert between_nodes.check_between_nodes(job) == []
    monkeypatch.setattr(between_nodes, "open_files", lambda pid: (OpenFile(pid, 9, "/dev/infiniband/uverbs0"),))
    (found,) = between_nodes.check_between_nodes(job)
    assert (found.severity, found.code) == ("blocking", "GPUCR-NODES-NCCL")
    assert found.what == f"the job uses RDMA in 1 process ({os.getpid()})"
