"""Files that gpucr keeps from one command to the next, as somebody else may have left them.

A target returns whether it took what it got for sound.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from msgspec.structs import replace

from gpucr.borrow import ledger
from gpucr.cli import borrow as borrow_command
from gpucr.cli.jobs import _More, _supervision_fields
from gpucr.containers import action, criu_config, meeting, record
from gpucr.diagnosis.canaries import store as canaries
from gpucr.diagnosis.canaries.results import MeasuredMachine
from gpucr.errors import GpucrError, SnapshotDamaged
from gpucr.gpu_state import at_work, placement, suspended
from gpucr.jobs import record as records
from gpucr.jobs.registry import Registry
from gpucr.jobs.sandbox import label
from gpucr.linux import unit_files
from gpucr.linux.process_records import ProcessRecords
from gpucr.model import ProcessId
from gpucr.network import records as network_records
from gpucr.on_demand import listing
from gpucr.on_demand.address import parse_all
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.settings import OnDemand
from gpucr.privileged import sandboxes
from gpucr.privileged.keys import Keys, SignedFile, signature
from gpucr.privileged.rights import Refused
from gpucr.records import RecordError, encode
from gpucr.supervise.folder import SupervisedFolder
from gpucr.undo import left_behind, recovery
from tests.fuzz.damage import Target, refused, seeds

ME = ProcessId(os.getpid(), 1)


def job_record(data: bytes) -> bool:
    try:
        found = records.decode(data)
    except RecordError:
        return False
    assert records.decode(encode(found)) == found
    records.state_of(found)
    return True


def registry(data: bytes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train").mkdir()
        (Path(folder) / "train" / "record.json").write_bytes(data)
        (job,) = Registry(Path(folder)).jobs()
        assert job.name == "train"
        with contextlib.suppress(GpucrError):
            Registry(Path(folder)).forget("train")
        return job.record is not None


def job_status(data: bytes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.status"
        path.write_bytes(data)
        sound = records.decode(seeds("job_record")[0])
        ended = records._read_status(replace(sound, status_path=str(path)))
    assert ended is None or (ended.exit_code is None) != (ended.signal is None)
    return ended is not None


@contextlib.contextmanager
def _runtime_folder() -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(ProcessRecords, "folder", return_value=Path(folder)),
    ):
        yield Path(folder)


def process_note(data: bytes) -> bool:
    """The notes of GPUs, of suspends, of work and of what is unfinished in /run/gpucr."""
    with _runtime_folder():
        suspended.RECORDS.path(ME).write_bytes(data)
        found, gpus = suspended.recall(ME), placement._recall(ME)
        work = at_work.RECORDS.read(ME, at_work.WorkRecord)
        unfinished = left_behind.RECORDS.read(ME, left_behind.Unfinished)
        assert at_work.may_be_on(ME, ["GPU-0"])  # nobody who could have written it is alive
    assert found is None or all(isinstance(each, int) for each in found.device_bytes.values())
    assert gpus is None or all(isinstance(gpu.uuid, str) for gpu in gpus.known)
    return any(each is not None for each in (found, gpus, work, unfinished))


def network_record(data: bytes) -> bool:
    """Connections kept for a snapshot, in /run/gpucr."""
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(network_records, "runtime_folder", return_value=Path(name)),
    ):
        network_records.folder().mkdir(parents=True)
        (network_records.folder() / "gpucr-1.json").write_bytes(data)
        kept = network_records.read("gpucr-1")
    assert kept is None or all(0 < each.remote.port < 1 << 16 for each in kept.connections)
    return kept is not None


def sandbox_note(data: bytes) -> bool:
    """Root's note of whose a sandbox is, and a hook's of where the images are."""
    with _runtime_folder():
        sandboxes._RECORDS.path(ME).write_bytes(data)
        noted, images = sandboxes._RECORDS.read(ME, sandboxes.Noted), action._noted_images(ME)
    assert meeting.MEETINGS is not None
    assert images is None or images.is_absolute()
    return noted is not None or images is not None


def canary_results(data: bytes) -> bool:
    machine = MeasuredMachine("580.1", ("NVIDIA H200",), "6.18.0")
    with tempfile.TemporaryDirectory() as folder:
        canaries.file_for(machine, Path(folder)).write_bytes(data)
        report = canaries.load(machine, Path(folder))
    assert report.machine == machine
    return bool(report.results)


def guard_record(data: bytes) -> bool:
    try:
        found = recovery.decode(data)
    except ValueError:
        return False
    assert recovery.decode(recovery.encode(found)) == found
    with contextlib.suppress(ValueError, ImportError):
        recovery.load(found.entries)
    return True


def keeper_tag(data: bytes) -> bool:
    found = label.decode(data)
    assert found is None or isinstance(found.keeper, int)
    return found is not None


def container(data: bytes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "container.json").write_bytes(data)
        try:
            assert record.read_record(Path(folder)).runtime in record.RUNTIMES
        except SnapshotDamaged:
            return False
    return True


@contextlib.contextmanager
def state_folder(path: str, data: bytes) -> Iterator[None]:
    """Where gpucr's state is during the block, with one file."""
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, {"XDG_STATE_HOME": home}):
        file = Path(home) / "gpucr" / path
        file.parent.mkdir(parents=True, mode=0o700)
        file.write_bytes(data)
        yield


def supervision_settings(data: bytes) -> bool:
    with state_folder("supervise/train/settings.json", data):
        try:
            found = SupervisedFolder("train").settings()
        except GpucrError as e:
            return refused(e, "GPUCR-SUPERVISION-DAMAGED")
    found.check()
    return True


def supervision_state(data: bytes) -> bool:
    with state_folder("supervise/train/state.json", data):
        folder = SupervisedFolder("train")
        folder.running()
        try:
            found = folder.state()
        except GpucrError as e:
            return refused(e, "GPUCR-SUPERVISION-DAMAGED")
        folder.write_state(found)
        assert folder.state() == found
    json.dumps(_supervision_fields(_More(state=found)))
    return True


def on_demand_settings(data: bytes) -> bool:
    with state_folder("on-demand/llama/settings.json", data):
        try:
            found = OnDemandFolder("llama").settings()
        except GpucrError as e:
            return refused(e, "GPUCR-ON-DEMAND-DAMAGED")
    found.check()
    assert all(map(str, parse_all(found.listen)))
    return True


def on_demand_state(data: bytes) -> bool:
    with state_folder("on-demand/llama/state.json", data):
        folder = OnDemandFolder("llama")
        folder.running()
        try:
            found = folder.state()
        except GpucrError as e:
            return refused(e, "GPUCR-ON-DEMAND-DAMAGED")
        folder.write_state(found)
        assert folder.state() == found
        folder.write_settings(OnDemand(("8001:8000",)))
        assert listing.look("llama") is not None
    return True


def borrower(data: bytes) -> bool:
    with state_folder("borrow/borrow-1.json", data):
        try:
            (found,) = ledger.borrowings()
        except GpucrError as e:
            return refused(e, "GPUCR-BORROW-DAMAGED")
        assert found.name == "borrow-1"
        assert isinstance(found.is_gone, bool)
        ledger.leave(found)
        assert ledger.borrowings() == ()
    assert borrow_command._as_time(found.created_s)
    return True


_KEY = bytes(32)


def helper_signature(data: bytes) -> bool:
    """Nobody signs without the key: only what was signed is taken."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "own.key").write_text(_KEY.hex())
        (Path(folder) / "own.key").chmod(0o600)
        try:
            found = Keys(Path(folder)).verified(data, 4711)
        except Refused:
            return False
    assert signature(found.files, found.uid, found.network, _KEY) == signature(
        (SignedFile("core-1.img", 5, "0" * 64),), 4711, "own", _KEY
    )
    return True


def unit_file(data: bytes) -> bool:
    """A unit of systemd, which gpucr writes over any other content."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "gpucr.service"
        path.write_bytes(data)
        assert unit_files.write(path, "[Unit]\n").what == ("unchanged" if data == b"[Unit]\n" else "changed")
        assert path.read_bytes() == b"[Unit]\n"
    return data == b"[Unit]\n"


def criu_conf(data: bytes) -> bool:
    """CRIU's configuration, which gpucr changes in place: all that is somebody else's stays.

    A line that gpucr has added, which is how it knows its own, may go.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "runc.conf"
        path.write_bytes(data)
        before = [line for line in re.split(rb"(?<=\n)", data) if not criu_config._is_ours(line)]
        criu_config.install("runc", folder, force=True)
        assert criu_config.status(folder).configured == (path,)
        installed = path.read_bytes()
        assert installed.startswith(b"".join(before))
        assert [line for line in installed.split(b"\n") if criu_config._is_script(line)] == [
            f"action-script {folder}/{criu_config.SCRIPT_NAME}".encode()
        ]
        criu_config.install("runc", folder, force=True)
        assert path.read_bytes() == installed, "a second time changes nothing"
        criu_config.uninstall(folder)
        assert criu_config.status(folder).configured == ()
        left = path.read_bytes() if path.exists() else b""
        kept = b"".join(before)
        assert left in (kept, kept + b"\n")
        return True


TARGETS: dict[str, Target] = {
    each.__name__: each
    for each in (
        job_record, registry, job_status, process_note, network_record, sandbox_note, canary_results, guard_record,
        keeper_tag, container, supervision_settings, supervision_state, borrower, helper_signature,
        on_demand_settings, on_demand_state,
        unit_file, criu_conf,
    )
}  # fmt: skip
