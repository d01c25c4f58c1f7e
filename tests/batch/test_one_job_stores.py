"""`gpucr batch --one-job` with an encrypted store, and with one in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import command
from tests.batch.one_job import OneJob
from tests.nodes.conftest import require_networks
from tests.store.s3_server import BUCKET, CuttingProxy, Server, serving
from tests.storm import long

pytestmark = [pytest.mark.criu, long]


@pytest.fixture
def job(sim_only: None, tmp_path: Path) -> Iterator[OneJob]:
    """A job for two nodes, and two more to go to."""
    require_networks()
    with ExitStack() as opened:
        made = OneJob(tmp_path / "job", spare=2)
        opened.callback(made.close)
        yield made


def comes_back(job: OneJob, *options: object) -> None:
    """It is dumped in between and at a signal, and continues on other nodes to its end."""
    job.start("--every", "500ms", *options)
    job.goes_on()
    job.wait_for("dumped to", 2)
    job.goes_on()
    job.signal()
    assert job.codes() == [99, 99], job.said()
    job.nothing_runs()
    assert [complete for _, complete in job.sets()] == [True]
    job.start("--every", "500ms", *options, at=[2, 3])
    job.goes_on()
    job.wait_for("restored from", 2)
    job.finish()
    assert job.codes() == [0, 0], job.said()
    assert job.sets() == set()


# --- encrypted ---------------------------------------------------------------------------------------------------


@pytest.fixture
def key_file(job: OneJob) -> Path:
    """The key of the job's store."""
    path = job.folder / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    job.key_words = ("--key-file", path)
    return path


@pytest.mark.parametrize("is_there", [True, False], ids=["made before", "made by the first start"])
def test_an_encrypted_store(job: OneJob, key_file: Path, is_there: bool) -> None:
    if is_there:
        assert command.run("store", "init", job.store, "--encrypt", "--key-file", key_file).returncode == 0
    comes_back(job, "--key-file", key_file)
    assert "GPUCR-WRONG-KEY" in command.run("ls", job.store, env={"GPUCR_PASSPHRASE": "guessed"}).stderr
    plain = [path.read_bytes() for path in job.store.rglob("*") if path.is_file()]
    assert not any(b"SLURM_STEP_NODELIST" in each for each in plain), "the environment of the job is to be secret"


def test_a_node_with_another_key(job: OneJob, key_file: Path) -> None:
    (other := job.folder / "other").write_bytes(bytes(32))
    other.chmod(0o600)
    job.start("--key-file", key_file, parts=[0])
    waiting = job.tasks
    job.wait_for_ears(0)
    job.start("--key-file", other, parts=[1])
    codes, job.tasks = job.codes(), waiting
    assert codes == [5], job.said()
    assert "GPUCR-WRONG-KEY" in job.said(1)
    job.signal(0)
    assert job.codes() == [99], job.said()
    job.nothing_runs()


# --- in an object store ------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def in_s3(job: OneJob, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneJob]:
    """The same, with a store that each machine reaches through a proxy of its own."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as opened:
        for machine in job.machines:
            listener = machine.listen(server.port)
            opened.enter_context(CuttingProxy(server.port, lambda *_: None, listener, each_request=True))
        job.store_at(f"s3://{BUCKET}/jobs")
        assert command.run("store", "init", job.stores[0]).returncode == 0
        yield job


def test_an_object_store(in_s3: OneJob) -> None:
    comes_back(in_s3)


def test_an_encrypted_object_store(in_s3: OneJob, key_file: Path) -> None:
    in_s3.store_at(f"s3://{BUCKET}/secret")
    assert command.run("store", "init", in_s3.stores[0], "--encrypt", "--key-file", key_file).returncode == 0
    comes_back(in_s3, "--key-file", key_file)
