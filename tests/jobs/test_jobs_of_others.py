"""Root names running jobs of other users, whose registries can refer only to their own processes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.errors import InvalidRequest
from gpucr.jobs import others
from gpucr.linux import processes
from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.helper.test_ordinary_user import runs
from tests.ordinary_user import CannotHaveUsers, OrdinaryUser, ordinary_user
from tests.ports import lasting_port

pytestmark = [pytest.mark.root, pytest.mark.in_turn]


@pytest.fixture(scope="module")
def machine(sim_only_module: None) -> Iterator[OrdinaryUser]:
    try:
        with ordinary_user() as user:
            yield user
    except CannotHaveUsers as e:
        skip_or_fail("root", f"the tests may not mount here: {e}")


@pytest.fixture(scope="module")
def sim_only_module(platform: str) -> None:
    if platform != "sim":
        pytest.skip("the user needs the simulator")


@pytest.fixture
def user(machine: OrdinaryUser) -> Iterator[OrdinaryUser]:
    yield machine
    machine.end_all()
    shutil.rmtree(registry_of(machine), ignore_errors=True)


def registry_of(user: OrdinaryUser) -> Path:
    return user.home / ".local/state/gpucr/jobs"


def start_sleeper(user: OrdinaryUser, name: str) -> int:
    return user.start_job(name, sys.executable, "-I", "-c", "import time; time.sleep(1000)")


def listed(user: OrdinaryUser) -> list[str]:
    """What root sees of this user's jobs."""
    done = user.as_root("jobs", "--all-users", "--json")
    assert done.returncode == 0, done.stderr
    names: list[str] = [job["name"] for job in json.loads(done.stdout)["jobs"]]
    return [name for name in names if name.startswith(user.name)]


def test_root_sees_and_suspends_a_job_by_its_users_name(user: OrdinaryUser) -> None:
    port = lasting_port(socket.SOCK_DGRAM)
    pid = user.start_counter("nj", port)
    assert listed(user) == [f"{user.name}/nj"]
    assert f"{user.name}/nj" in user.as_root("jobs", "--all-users").stdout
    suspended = user.as_root("suspend", f"{user.name}/nj")
    assert suspended.returncode == 0, suspended.stderr
    assert suspended.stdout == f"{pid} checkpointed (was running)\n"
    assert user.as_root("resume", f"{user.name}/nj").returncode == 0
    assert user.succeeds("sim", "ask", str(port), "inc") == "101\n"


def test_a_plain_name_finds_the_users_job_for_root(user: OrdinaryUser) -> None:
    start_sleeper(user, "only-hers")
    done = user.as_root("dump", "only-hers", "--to", str(user.home / "no"))
    assert done.returncode == 2
    assert f"another user has one: {user.name}/only-hers" in done.stderr
    near = user.as_root("suspend", f"{user.name}/only-her")
    assert f"did you mean {user.name}/only-hers?" in near.stderr
    assert "there is no user 'nobody-at-all'" in user.as_root("suspend", "nobody-at-all/x").stderr
    logs = user.as_root("logs", f"{user.name}/only-hers")
    assert f"sudo -H -u {user.name} gpucr COMMAND only-hers" in logs.stderr


def test_it_is_for_root_alone(user: OrdinaryUser) -> None:
    for arguments in (("jobs", "--all-users"), ("suspend", "root/x")):
        code, said = user.refused(*arguments)
        assert code == "GPUCR-NOT-PERMITTED"
        assert "only root can" in said


def test_an_ended_job_is_omitted(user: OrdinaryUser) -> None:
    pid = start_sleeper(user, "ended")
    user.end_all()
    wait_until(lambda: not runs(pid), "the job to end")
    assert listed(user) == []
    assert "runs here" in user.as_root("suspend", f"{user.name}/ended").stderr


# --- lies ---------------------------------------------------------------------------------------------------------


def test_a_record_that_names_a_root_process_is_ignored(user: OrdinaryUser) -> None:
    start_sleeper(user, "liar")
    path = registry_of(user) / "liar/record.json"
    record = json.loads(path.read_text())
    stat = processes.read_stat(os.getpid())
    assert stat is not None
    record["root"] = {"pid": os.getpid(), "start_time_ticks": stat.start_time_ticks}
    record["keeper"] = None
    path.write_text(json.dumps(record))
    assert json.loads(user.succeeds("jobs", "--json"))["jobs"][0]["pid"] == os.getpid()  # a record that can be read
    assert listed(user) == []
    assert user.as_root("suspend", f"{user.name}/liar").returncode == 2


def test_links_pipes_and_files_of_others_are_not_read(user: OrdinaryUser) -> None:
    start_sleeper(user, "real")
    folder = registry_of(user)
    content = (folder / "real/record.json").read_text().replace('"real"', '"{}"')
    theirs = user.home / "of-root"
    theirs.write_text(content.replace("{}", "linked"))
    for name in ("linked", "piped", "owned", "large"):
        (folder / name).mkdir()
    (folder / "linked/record.json").symlink_to(theirs)
    os.mkfifo(folder / "piped/record.json")
    (folder / "owned/record.json").write_text(content.replace("{}", "owned"))  # root's own file, linked hard
    large = folder / "large/record.json"
    large.write_text(content.replace("{}", "large") + " " * (64 << 20))
    (folder / "elsewhere").symlink_to(folder / "real")
    for path in (folder / "linked", folder / "linked/record.json", large, folder / "piped/record.json", theirs):
        os.chown(path, user.uid, user.uid, follow_symlinks=False)
    assert listed(user) == [f"{user.name}/real"]


def test_a_registry_behind_a_link_is_not_read(user: OrdinaryUser) -> None:
    start_sleeper(user, "moved")
    folder = registry_of(user)
    folder.rename(user.home / "elsewhere")
    folder.symlink_to(user.home / "elsewhere")
    os.chown(folder, user.uid, user.uid, follow_symlinks=False)
    try:
        assert listed(user) == []
    finally:
        folder.unlink()
        (user.home / "elsewhere").rename(folder)
    assert listed(user) == [f"{user.name}/moved"]


def test_names_that_escape_the_registry_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"no job '\.\./\.\./x' of user"):
        others.find_running("daemon/../../x")
