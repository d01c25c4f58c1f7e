"""`gpucr.inspect` and `gpucr inspect` on snapshots of real jobs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.containers import plain_files
from gpucr.gpu_state.staging import capture
from gpucr.linux import capabilities
from tests.command import run, run_json
from tests.conftest import skip_or_fail
from tests.counter import CounterFactory
from tests.sandboxed import end_all_in, start_counter
from tests.storm import later

pytestmark = pytest.mark.criu
MIB = 1 << 20
DEVICE_MIB = 64  # more than a small program has of host memory, with a real driver as well


@pytest.fixture(autouse=True)
def as_root() -> None:
    if not capabilities.can_checkpoint_processes():
        skip_or_fail("root", "dumps need root")


def of_kind(uses: tuple[gpucr.MemoryUse, ...], kind: str) -> gpucr.MemoryUse:
    (use,) = [use for use in uses if use.kind == kind]
    return use


def test_a_job_with_device_memory(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", str(DEVICE_MIB), "--fork", "1")
    root, child = job.processes()
    snapshot = gpucr.dump(job.pid, tmp_path / "s").snapshot
    job.reap()
    contents = gpucr.inspect(snapshot)
    assert contents.problems == ()
    assert contents.packed_bytes is None
    assert {process.pid: process.record.parent_pid for process in contents.processes}[child] == root
    for process in contents.processes:
        device = of_kind(process.memory, "device")
        data = process.record.device_data
        assert data is not None
        assert (device.mapped_bytes, device.stored_bytes) == (data.size_bytes, data.stored_bytes)
        assert device.stored_bytes >= DEVICE_MIB * MIB
        # The driver's staging is a reservation in CRIU's images: it counts once, as device memory.
        assert of_kind(process.memory, "anonymous").stored_bytes < DEVICE_MIB * MIB
        assert of_kind(process.memory, "reserved").mapped_bytes >= data.size_bytes
        assert [each.kind for each in process.descriptors].count("udp") == 1
        assert process.descriptors[1].name == str(job.folder / "stdout")
    total = of_kind(contents.memory, "device")
    assert total.stored_bytes == sum(of_kind(p.memory, "device").stored_bytes for p in contents.processes)


def test_the_tree_and_the_json_of_a_job(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "1", "--fork", "1")
    root, child = job.processes()
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    done = run("inspect", tmp_path / "s", "--files")
    assert (done.returncode, done.stderr) == (0, "")
    tree = done.stdout[done.stdout.index("job: 2 processes") :].splitlines()
    assert tree[1] == "├─ memory of all"
    (upper,) = [line for line in tree if f"─ {root} (running, " in line]
    (lower,) = [line for line in tree if f"─ {child} (running, " in line]
    assert lower.index("─ ") == upper.index("─ ") + 3, "it is one step further in"
    assert tree.index(upper) < tree.index(lower)
    assert [line for line in tree if line.endswith(f"├─ 1 file {job.folder / 'stdout'}")]
    assert [line for line in tree if "─ sockets: 1 udp" in line]
    printed = run_json("inspect", tmp_path / "s")
    (first, second) = printed["contents"]["processes"]
    assert (first["pid"], second["pid"]) == (root, child)
    assert {use["kind"] for use in first["memory"]} >= {"device", "anonymous", "file", "kernel", "reserved"}
    assert {"fd": 1, "kind": "file", "name": str(job.folder / "stdout")} in first["descriptors"]
    assert printed["contents"]["problems"] == []


def test_device_memory_dumped_the_plain_way(
    counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where staging cannot be captured it is in CRIU's images."""
    job = counter("--mib", str(DEVICE_MIB))
    with monkeypatch.context() as patch:
        patch.setattr(capture, "_SMALLEST_BYTES", 1 << 50)
        gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    (process,) = gpucr.inspect(tmp_path / "s").processes
    assert process.record.device_data is None
    device = of_kind(process.memory, "device")
    assert device.mapped_bytes == sum(extent.size_bytes for extent in process.record.staging)
    assert DEVICE_MIB * MIB <= device.stored_bytes <= device.mapped_bytes
    assert of_kind(process.memory, "anonymous").stored_bytes < DEVICE_MIB * MIB
    shown = run("inspect", tmp_path / "s").stdout
    assert "stored in CRIU's images\n" in shown[shown.index("├─ device memory: ") :]


def _body(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["manifest"]
    return body


def _write(folder: Path, body: dict[str, Any]) -> None:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    outer = {"sha256": hashlib.sha256(canonical).hexdigest(), "manifest": body}
    (folder / "manifest.json").write_text(json.dumps(outer))


def test_a_job_in_a_sandbox_has_the_manifests_pids(sim_only: None, tmp_path: Path, state_home: Path) -> None:
    """CRIU's images have the pids of the inside."""
    folder = tmp_path / "job"
    folder.mkdir()
    try:
        with start_counter(folder, "--mib", "1", "--fork", "1") as job:
            contents = gpucr.inspect(gpucr.dump(job.pid, tmp_path / "s").snapshot)
    finally:
        end_all_in(folder)
    assert contents.problems == ()
    assert contents.processes[0].pid == job.pid
    for process in contents.processes:
        assert process.pid != process.record.ns_pids[-1]
        assert of_kind(process.memory, "anonymous").stored_bytes > 0
        assert process.descriptors


def test_the_gpu_part_of_a_checkpoint_is_among_the_images(counter: CounterFactory, tmp_path: Path) -> None:
    """So a container runtime has it: CRIU's images are its own, and gpucr's folder is one of theirs."""
    job = counter("--mib", "1")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    around = (tmp_path / "s" / "images").rename(tmp_path / "checkpoint")
    contents = gpucr.inspect((tmp_path / "s").rename(around / "gpucr"))
    assert contents.problems == ()
    (process,) = contents.processes
    assert of_kind(process.memory, "anonymous").stored_bytes > 0
    assert of_kind(process.memory, "device").stored_bytes >= MIB
    assert gpucr.inspect(around).processes == contents.processes
    around.rename(tmp_path / "images")  # as in the folder that `gpucr dump --container` makes
    assert gpucr.inspect(tmp_path).processes == contents.processes


def test_commands_read_the_gpu_part_of_a_containers_images(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "1")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    around = (tmp_path / "s" / "images").rename(tmp_path / "checkpoint")
    part = (tmp_path / "s").rename(around / "gpucr")
    _write(part, {**_body(part), "files": []})
    assert run("verify", around).returncode == 0
    assert f"snapshot    {part}\n" in run("inspect", around, "--verify").stdout
    done = run("restore", around)
    assert done.returncode == 2
    assert "is the GPU part of a container's checkpoint" in done.stderr
    for stripe in (part / "device").iterdir():
        stripe.write_bytes(bytes(stripe.stat().st_size))
    for arguments in (("verify", around), ("inspect", around, "--verify")):
        assert run(*arguments).returncode == 5


@pytest.mark.parametrize("folder", [later(""), "checkpoint"], ids=["images", "archive"])
def test_commands_read_a_gpu_part_of_plain_files(folder: str, counter: CounterFactory, tmp_path: Path) -> None:
    """So containerd has it (containers/plain_files.py), and in an unpacked archive of a kubelet's one folder deeper."""
    job = counter("--mib", "1")
    before = gpucr.inspect(gpucr.dump(job.pid, tmp_path / "s").snapshot)
    job.reap()
    named = tmp_path / "unpacked"
    around = named / folder
    around.parent.mkdir(exist_ok=True)
    (tmp_path / "s" / "images").rename(around)
    part = (tmp_path / "s").rename(around / "gpucr")
    _write(part, {**_body(part), "files": []})
    plain_files.scatter(around)
    stripes = sorted(around.glob("gpucr.device.*"))
    assert stripes
    assert not part.exists()
    assert run("verify", named).returncode == 0
    assert f"snapshot    {around}\n" in run("inspect", named, "--verify").stdout
    contents = gpucr.inspect(named)
    assert contents.problems == ()
    assert [process.memory for process in contents.processes] == [process.memory for process in before.processes]
    done = run("restore", named)
    assert done.returncode == 2
    assert "is the GPU part of a container's checkpoint" in done.stderr

    stripes[0].chmod(0o622)
    done = run("verify", named)
    assert done.returncode == 5
    assert f"{stripes[0]} can be written by others" in done.stderr
    stripes[0].chmod(0o600)
    for stripe in stripes:
        stripe.write_bytes(bytes(stripe.stat().st_size))
    for arguments in (("verify", named), ("inspect", named, "--verify")):
        done = run(*arguments)
        assert done.returncode == 5
        assert "gpucr.device." in done.stderr
        assert "differs from what was written" in done.stderr
    stripes[-1].unlink()
    done = run("verify", named)
    assert done.returncode == 5
    assert f"{stripes[-1].name}, which holds device memory of process {job.pid}, is missing" in done.stderr


@pytest.mark.parametrize("key", [later(None), gpucr.Secret.key_file(bytes(32))], ids=["plain", "encrypted"])
def test_a_snapshot_in_a_store(counter: CounterFactory, tmp_path: Path, key: gpucr.Secret | None) -> None:
    """The output is the same as for a folder, plus the compressed size."""
    store = tmp_path / "store"
    gpucr.init_store(store, key=key)
    job = counter("--mib", "8", "--fork", "1")
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    gpucr.dump(job.pid, f"{store}#a", key=key, compress="strong")
    job.reap()
    plain, contents = gpucr.inspect(tmp_path / "s"), gpucr.inspect(f"{store}#a", key=key)
    assert contents.problems == ()
    assert [each.descriptors for each in contents.processes] == [each.descriptors for each in plain.processes]
    for process in contents.processes:
        device = of_kind(process.memory, "device")
        assert device.packed_bytes is not None
        assert 8 * MIB < device.packed_bytes <= device.stored_bytes + 4096, "the counter's bytes are random"
    total = of_kind(contents.memory, "device")
    assert total.packed_bytes == sum(of_kind(p.memory, "device").packed_bytes or 0 for p in contents.processes)
    assert contents.packed_bytes is not None
    assert 8 * MIB < contents.packed_bytes < contents.snapshot.manifest.size_bytes, "what both have is there once"


def test_the_tree_of_a_snapshot_in_a_store(counter: CounterFactory, tmp_path: Path) -> None:
    gpucr.init_store(tmp_path / "store")
    job = counter("--mib", "1")
    gpucr.dump(job.pid, f"{tmp_path}/store#a")
    job.reap()
    done = run("inspect", tmp_path / "store", "--verify", "--files")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = [line for line in done.stdout.splitlines() if "─ device memory: " in line]
    assert " stored in the store, " in line
    assert line.endswith(" compressed")
    assert f"file {job.folder / 'stdout'}\n" in done.stdout
    assert run_json("inspect", tmp_path / "store")["contents"]["packed_bytes"] > MIB
    for pack in (tmp_path / "store" / "packs").glob("*/*"):
        pack.unlink()
    for index in (tmp_path / "store" / "index").iterdir():
        index.unlink()
    done = run("inspect", tmp_path / "store")
    assert done.returncode == 0
    assert "lacks the piece" in done.stderr
    assert f"{job.pid} (running" in done.stdout
    assert run("inspect", tmp_path / "store", "--verify").returncode == 5


def test_not_a_snapshot(tmp_path: Path) -> None:
    with pytest.raises(gpucr.SnapshotUnfinished):
        gpucr.inspect(tmp_path)
