"""What a new user types instead of what was meant: the message says what it is, and what to type."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import gpucr
from gpucr.diagnosis.preflight.tree import check_free_pids
from gpucr.linux.pid_uses import uses_of_pids
from gpucr.linux.reachable import closed_to_others
from gpucr.operations import launch
from gpucr.supervise.folder import SupervisedFolder
from gpucr.supervise.settings import Supervision
from tests import command
from tests.counter import CounterFactory, wait_until

pytestmark = pytest.mark.usefixtures("state_home")


def told(code: int, *arguments: object, env: dict[str, str] | None = None) -> tuple[str, str]:
    """The error and the hint of a command that ends with this exit code."""
    done = command.run(*arguments, env=env)
    assert done.returncode == code, done.stderr
    fields = dict(line.split(":", 1) for line in done.stderr.splitlines() if line[:5] in ("error", "hint:"))
    return fields["error"].strip(), fields["hint"].strip()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder that looks like a plain snapshot's."""
    folder = tmp_path / "plain"
    folder.mkdir(mode=0o700)
    (folder / "manifest.json").touch(mode=0o600)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store without snapshots."""
    gpucr.init_store(tmp_path / "store")
    return tmp_path / "store"


def test_a_plain_snapshot_instead_of_a_store(plain: Path, store: Path) -> None:
    for words in (("ls", plain), ("prune", plain), ("copy", plain, store), ("store", "keys", plain)):
        error, hint = told(5, *words)
        assert error == f"{plain} is the folder of a plain snapshot, not a store"
        assert f"gpucr inspect {plain}" in hint
    assert "rm -r" in told(2, "rm", plain)[1]


def test_a_snapshot_in_a_store_instead_of_a_store(store: Path) -> None:
    for words in (("ls",), ("prune",), ("store", "keys"), ("store", "init"), ("copy", store)):
        error, hint = told(2, *words, f"{store}#monday")
        assert error == f"{store}#monday names a snapshot, and a store is meant"
        assert "#" in hint


def test_the_keys_of_a_store_that_is_not_encrypted(store: Path) -> None:
    error, hint = told(5, "store", "keys", store)
    assert error == f"the store {store} is not encrypted"
    assert "--encrypt" in hint


def test_an_encrypted_store_without_its_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    assert command.run("store", "init", tmp_path / "store", "--encrypt", "--key-file", key).returncode == 0
    _, hint = told(5, "ls", tmp_path / "store")
    assert "--key-file FILE" in hint
    assert "GPUCR_PASSPHRASE" in hint


@pytest.mark.parametrize("words", [("store", "init"), ("run", "--every", "1m", "--name", "job", "--to")])
def test_a_store_in_a_folder_that_does_not_exist(words: tuple[str, ...], tmp_path: Path) -> None:
    rest = ("--", "true") if words[0] == "run" else ()
    _, hint = told(5, *words, tmp_path / "no" / "store", *rest)
    assert hint == f"make the folder above first: mkdir -p {tmp_path / 'no'}"


@pytest.mark.parametrize("name", ["restore", "inspect", "verify"])
def test_a_jobs_name_instead_of_a_snapshot(name: str) -> None:
    launch.run_job(["true"], name="train", isolate=False)
    wait_until(lambda: launch.list_jobs()[0].state.word == "ended", "the job to end")
    error, hint = told(2, name, "train")
    assert error == "train is a job (ended), not a snapshot"
    assert "gpucr dump train --to" in hint
    assert told(2, name, "trian")[0] == "trian is not a folder"


def test_a_folder_where_a_job_is_named() -> None:
    for target in ("/x", "/x/y", "a/b/c", "a/"):
        assert told(2, "logs", target)[0] == f"{target!r} is neither a pid nor the name of a job"
    error, _ = told(2, "dump", "train", "/var/snapshots/a")
    assert error.endswith("is neither a pid nor the name of a job: a folder or store goes after --to")


@pytest.mark.parametrize(("given", "is_taken"), [("0.05", True), ("50ms", True), ("0", False), ("soon", False)])
def test_every_limit_takes_seconds_and_units(given: str, is_taken: bool, process_without_cuda: int) -> None:
    launch.run_job(["sleep", "1000"], name="long", isolate=False)
    try:
        error, _ = told(6 if is_taken else 2, "wait", "long", "--timeout", given)
        assert (error == "the job long still runs") == is_taken
        error, _ = told(2, "suspend", process_without_cuda, "--timeout", given)
        assert ("does not use CUDA" in error) == is_taken
        error, _ = told(6 if is_taken else 2, "sim", "ask", "9", "--timeout", given)
        assert ("no counter answers" in error) == is_taken
    finally:
        assert command.run("kill", "long").returncode == 0


def test_jobs_by_name_show_ended_ones_too() -> None:
    for name in ("a", "b"):
        launch.run_job(["true"], name=name, isolate=False)
    wait_until(lambda: {job.state.word for job in launch.list_jobs()} == {"ended"}, "the jobs to end")
    assert [job["name"] for job in command.run_json("jobs", "b")["jobs"]] == ["b"]
    assert told(2, "jobs", "c")[0] == "there is no job 'c'"
    assert told(2, "jobs", "--forget")[1] == "name them: gpucr jobs --forget NAME"
    assert command.run("jobs", "--forget", "a", "b").stdout.splitlines() == [
        f"{name} forgotten (ended (exit code 0))" for name in ("a", "b")
    ]


def test_a_criu_that_is_named_and_missing_is_not_replaced(tmp_path: Path) -> None:
    error, hint = told(4, "criu", env={"GPUCR_CRIU": str(tmp_path / "criu")})
    assert error == f"{tmp_path / 'criu'} does not start: No such file or directory"
    assert "GPUCR_CRIU" in hint


def test_a_relative_folder_in_an_xdg_variable_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert command.run("run", "--name", "job", "--no-isolate", "--", "true").returncode == 0
    assert not (tmp_path / "state").exists()
    assert (tmp_path / ".local/state/gpucr/jobs/job").is_dir()


def test_a_registry_without_room_says_where_it_is(tmp_path: Path) -> None:
    error, hint = told(3, "run", "--name", "job", "--", "true", env={"XDG_STATE_HOME": "/proc"})
    assert "Errno" not in error
    assert "/proc/gpucr" in hint


@pytest.mark.by_user
def test_a_home_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    tmp_path.chmod(0o777)
    error, hint = told(2, "jobs", env={"HOME": str(tmp_path)})
    assert "there is no registry of jobs" in error
    assert "Errno" not in error
    assert "HOME" in hint


def test_a_running_job_has_no_choice_of_gpus_for_a_resume(counter: CounterFactory) -> None:
    job = counter("--mib", "1")
    for options in (("--gpu-map", "0=1"), ("--gpu", "1")):
        error, hint = told(2, "resume", job.pid, *options)
        assert "no suspended device memory" in error
        assert "gpucr move" in hint


def test_units_where_no_systemd_reads_them(tmp_path: Path) -> None:
    done = command.run("service", "install", "--units-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"systemd does not read {tmp_path}: the units are written, and nothing was enabled" in done.stderr
    done = command.run("service", "install", "--units-dir", tmp_path, "--no-enable")
    assert done.stderr == ""


@pytest.mark.usefixtures("sim_only")
def test_a_machine_without_a_driver() -> None:
    error, hint = told(4, "ps", env={"LD_LIBRARY_PATH": ""})
    assert "libcuda.so.1" in error
    assert 'eval "$(gpucr sim env)"' in hint


def test_a_private_folder_above_a_program() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own folder is private
        folder = Path(name)
        program = folder / "venv/python"
        program.parent.mkdir()
        program.touch()
        link = folder / "link"
        link.symlink_to(program)
        way = (folder, program.parent, program)
        for each in way:
            each.chmod(0o755)
        assert closed_to_others([program, link, Path("/usr/bin/env")]) is None
        for each in way:
            each.chmod(0o700)
            assert closed_to_others([Path("/usr/bin/env"), program]) == each
            assert closed_to_others([link]) == each
            each.chmod(0o755)


def test_threads_of_a_process_that_has_a_wanted_pid_are_not_listed(counter: CounterFactory) -> None:
    job = counter("--mib", "1")
    threads = [int(each.name) for each in Path(f"/proc/{job.pid}/task").iterdir()]
    assert len(threads) > 1
    found = check_free_pids(uses_of_pids(threads))
    assert [finding.what for finding in found] == [f"pid {job.pid} is taken by counter"]


def test_a_pid_and_a_container() -> None:
    assert told(2, "dump", "1", "--container", "web", "--to", "x")[0].startswith("PID|NAME... cannot be combined with")


def test_a_new_job_is_not_supervised_as_the_earlier_one_of_its_name(tmp_path: Path) -> None:
    folder = SupervisedFolder("train")
    folder.write_settings(Supervision(store=str(tmp_path / "store"), every_s=60.0))
    folder.change_phase("supervised")
    folder.append_event({"event": "supervised"})
    assert command.run("run", "--name", "train", "--no-isolate", "--", "true").returncode == 0
    assert not folder.exists()
    assert folder.events_path.exists()
    assert command.run("supervise", "--all").stdout == "every job that is supervised has its supervisor\n"
    (job,) = command.run_json("jobs", "train")["jobs"]
    assert job["supervision"] is None
