"""Communication with other machines that no snapshot has."""

from __future__ import annotations

import os

import pytest

from gpucr.diagnosis.preflight import between_nodes
from gpucr.linux import memory, processes, sockets
from gpucr.linux.processes import OpenFile
from gpucr.model import Job


def test_rdma_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job((processes.describe(os.getpid()),), (), ())
    assert between_nodes.check_between_nodes(job) == []
    monkeypatch.setattr(between_nodes, "open_files", lambda pid: (OpenFile(pid, 9, "/dev/infiniband/uverbs0"),))
    (found,) = between_nodes.check_between_nodes(job)
    assert (found.severity, found.code) == ("blocking", "GPUCR-NODES-NCCL")
    assert found.what == f"the job uses RDMA in 1 process ({os.getpid()})"


class _Mapping:
    def __init__(self, path: str) -> None:
        self.path = path


def test_mapped_rdma_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job((processes.describe(os.getpid()),), (), ())
    monkeypatch.setattr(memory, "read_maps", lambda pid: [_Mapping("/dev/infiniband/uverbs1")])
    (found,) = between_nodes.check_between_nodes(job)
    assert "NCCL_NET=Socket" in found.remedy


@pytest.mark.parametrize(
    ("asked", "library", "refused"),
    [
        (None, "/lib/libnccl.so.2", None),
        ("Socket", "/lib/libnccl-net-ofi.so", None),
        ("socket", "/lib/libnccl.so.2", None),
        ("AWS Libfabric", "/lib/libnccl.so.2", "NCCL_NET=AWS Libfabric was set"),
        (None, "/lib/libnccl-net-ofi.so", "/lib/libnccl-net-ofi.so is mapped"),
        ("IB", "/lib/libc.so.6", None),
    ],
)
def test_networks_of_nccl(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, library: str, refused: str | None
) -> None:
    job = Job((processes.describe(os.getpid()),), (), ())
    monkeypatch.setattr(memory, "read_maps", lambda pid: [_Mapping(library)])
    monkeypatch.setattr(sockets, "abstract_names", lambda pid: ["@tmp/nccl-socket-0-70b77e7a9b128240"])
    environment = {} if asked is None else {"NCCL_NET": asked}
    monkeypatch.setattr(processes, "environment", lambda pid: environment)
    found = between_nodes.check_between_nodes(job)
    assert [refused in each.evidence for each in found if refused] == ([True] if refused else [])
    assert len(found) == (refused is not None)
