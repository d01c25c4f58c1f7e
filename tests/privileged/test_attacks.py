"""Attacks of a local user on the helper's socket, numbered as in docs/threat-model.md."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.helper.messages import MAX_REQUESTS_PER_USER, SIGNATURE_NAME
from gpucr.linux import processes
from gpucr.privileged import inheritance
from tests.counter import kill_at_once, wait_until
from tests.helper.test_sessions import CONNECTED, WITH_FILES, counted, dump, runs, start
from tests.ordinary_user import Machine, OrdinaryUser
from tests.storm import later, sample

pytestmark = pytest.mark.criu

REPOSITORY = Path(__file__).parents[2]
CLIENT = """
import json, os, select, socket, sys, time
from pathlib import Path
from gpucr.helper.client import _connected
from gpucr.helper.messages import *
from gpucr.linux import processes

connection = Connection(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
connection.socket.connect(os.environ["GPUCR_HELPER"])

def ask(request, fds=()):
    connection.send(request, fds)
    hooks = []
    while True:
        try:
            reply, _ = connection.receive(Here, Hook, Done, Failed)
        except HungUp:
            return print(json.dumps(["hung up", "", hooks]))
        if isinstance(reply, Hook):
            hooks.append(reply.name)
            connection.send(Answer(True))
        elif isinstance(reply, (Done, Failed)) or isinstance(request, Ask):
            message = reply.message if isinstance(reply, Failed) else ""
            return print(json.dumps([getattr(reply, "because", type(reply).__name__), message, hooks]))

def a_dump(pid, folder="images", leave_running=True, keeper=0):
    os.makedirs("images", exist_ok=True)
    images = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    log = os.open("log", os.O_WRONLY | os.O_CREAT, 0o600)
    return ask(Dump(pid, processes.read_stat(pid).start_time_ticks, leave_running, 1 << 20, keeper), (images, log))
"""
PRIVILEGED = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
u, other = int(sys.argv[1]), 65533
def become(uids=(u, u, u), gids=(u, u, u), groups=()):
    os.setgroups(groups)
    os.setresgid(*gids)
    os.setresuid(*uids)
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
if os.fork() == 0:
    {child}
    open(sys.argv[2], "w").close()
    time.sleep(100)
wait = sys.argv[2]
while not os.path.exists(wait): time.sleep(0.01)
become()
os.rename(wait, wait + ".ready")
time.sleep(100)
"""


def as_client(user: OrdinaryUser, script: str, *arguments: object, as_himself: tuple[str, ...] = ()) -> tuple[str, str]:
    """The helper's answer to a program of the user: the kind of failure (or of the answer), and the message."""
    path = f"PYTHONPATH={REPOSITORY / 'src'}:{REPOSITORY}"
    words = [sys.executable, "-c", CLIENT + textwrap.dedent(script), *map(str, arguments)]
    done = user.run("env", path, *words, as_himself=as_himself)
    assert done.returncode == 0, done.stderr
    because, message, _ = json.loads(done.stdout)
    return because, message


@pytest.fixture
def idle(user: OrdinaryUser) -> int:
    return user.start("sleep", "100")


# --- H1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    sample(
        [
            "connection.socket.send(b'x' * 100); ask(Ask())",
            "connection.socket.send(b'{}'); ask(Ask())",
            "ask(Answer(True))",
            "ask(Ask(), (0,))",
            "ask(Dump(1, 1, True, 0, 0))",
            "ask(Dump(1, 1, True, 0, 0), (0, 1, 2))",
            "ask(Restore(False, (), 5, 0), (0, 1, 2, 0, 1)); ",
            "ask(Dump(1, 1, True, 0, 0), (0, 1))",
        ],
        2,
    ),
)
def test_h1_an_invalid_request_ends_its_server_process(machine: Machine, user: OrdinaryUser, script: str) -> None:
    assert as_client(user, script)[0] in ("stopped", "refused", "hung up")
    assert machine.left_at_work() == []
    assert as_client(user, "ask(Ask())")[0] == "Here"


# --- H2, H3 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("child", "said"),
    [
        ("become((other,) * 3)", "does not run as uid"),
        ("become((u, u, 0))", "does not run as uid"),
        ("become((u, 0, u))", "does not run as uid"),
        ("become(gids=(u, u, other))", "group that the user has not"),
        ("become(groups=(other,))", "is in a group"),
        ("libc.prctl(8, 1, 0, 0, 0); become()", "has capabilities"),
        ("become(); libc.prctl(4, 0, 0, 0, 0)", "does not let its own user"),
        (
            "os.unshare(0x08000000) if hasattr(os, 'unshare') else libc.unshare(0x08000000); become()",
            "namespace of its own",
        ),
        ("os.chroot('/usr'); os.chdir('/'); become(); sys.argv[2] = '/../..' + sys.argv[2]", "root folder of its own"),
    ],
    ids=["uid", "saved", "effective", "gid", "group", "capability", "closed", "namespace", "chroot"],
)
def test_h2_a_tree_not_entirely_the_peers_is_not_touched(
    machine: Machine, user: OrdinaryUser, child: str, said: str
) -> None:
    if "chroot" in child:
        child = "token = os.open(os.path.dirname(sys.argv[2]), os.O_RDONLY); name = os.path.basename(sys.argv[2]); os.chroot('/usr'); os.chdir('/'); become(); os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=token)); time.sleep(100)"  # fmt: skip  # noqa: E501
    sign = user.home / "sign"
    user.home.joinpath("sign.ready").unlink(missing_ok=True)
    user.home.chmod(0o777)
    program = PRIVILEGED.format(child=child)
    started = user.start_as_root(sys.executable, "-c", program, str(user.uid), str(sign))
    try:
        wait_until((user.home / "sign.ready").exists, "the tree")
        because, message = as_client(user, "a_dump(int(sys.argv[1]))", started.pid)
        assert (because, said in message) == ("refused", True), message
        assert machine.left_at_work() == []
    finally:
        user.home.chmod(0o700)
        processes.kill_tree(started.pid, including_root=True)
        started.communicate()


def test_h2_processes_of_root_and_of_others_are_not_touched(user: OrdinaryUser) -> None:
    for pid in (1, os.getpid()):
        because, message = as_client(user, "a_dump(int(sys.argv[1]))", pid)
        assert because == "refused"
        assert "does not run as uid" in message


def test_h2_a_setuid_program_is_not_touched(user: OrdinaryUser) -> None:
    program = user.home / "sleep"
    program.write_bytes(Path("/bin/sleep").resolve().read_bytes())
    os.chown(program, user.uid, user.uid)
    program.chmod(0o4755)
    because, message = as_client(user, "a_dump(int(sys.argv[1]))", user.start(str(program), "100"))
    assert because == "refused"
    assert "setuid" in message or "look into" in message


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (("--no-new-privs",), "no_new_privs"),
        (("unshare", "--user", "--map-root-user"), "namespace"),
        (("unshare", "--user", "--map-root-user", "--mount"), "namespace of its own (mnt)"),
    ],
)
def test_h3_a_caller_in_a_sandbox_is_refused(user: OrdinaryUser, idle: int, before: tuple[str, ...], said: str) -> None:
    because, message = as_client(user, "a_dump(int(sys.argv[1]))", idle, as_himself=before)
    assert because == "refused"
    assert said in message


BY_ROOT = ("unshare", "--mount", "--propagation=private", "sh", "-ec")
"""As a batch system's daemon does for a job: a mount namespace of root's, in which a script mounts something."""


def test_h3_a_caller_in_mounts_that_root_has_made_is_served(machine: Machine, user: OrdinaryUser) -> None:
    """A private /tmp. The job and its parent get it back, and files in there."""
    place = user.home / "private"
    place.mkdir(exist_ok=True)
    os.chown(place, user.uid, user.uid)
    program = f"""
    import os, subprocess, sys
    opened = open({str(place / "inside")!r}, "w")
    def gpucr(*words):
        subprocess.run([sys.executable, "-m", "gpucr", *words], check=True, stdin=subprocess.DEVNULL)
    idle = [sys.executable, "-c", "import time; f = open({str(place / "inside")!r}); time.sleep(1000)"]
    job = subprocess.Popen(idle, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    while True:
        try:
            if any(os.path.basename(os.readlink(f"/proc/{{job.pid}}/fd/{{n}}")) == "inside"
                   for n in os.listdir(f"/proc/{{job.pid}}/fd")):
                break
        except FileNotFoundError:
            pass
    gpucr("dump", str(job.pid), "--to", {str(user.home / "snap-mounts")!r})
    job.wait()
    gpucr("restore", {str(user.home / "snap-mounts")!r})
    parent = open(f"/proc/{{job.pid}}/stat").read().rpartition(")")[2].split()[1]
    print(*(os.readlink(f"/proc/{{each}}/ns/mnt") == os.readlink("/proc/self/ns/mnt") for each in (job.pid, parent)))
    os.kill(job.pid, 9)
    """
    himself = shlex.join([*user.as_himself(), sys.executable, "-c", textwrap.dedent(program)])
    variables = {**user.environment, "MOUNTED": str(place)}
    done = subprocess.run(
        user.enter([*BY_ROOT, f'mount -t tmpfs -o mode=777 tmpfs "$MOUNTED"; exec {himself}']),
        env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["True True"], done.stdout + done.stderr
    assert machine.left_at_work() == []


ANOTHER_ROOT = """
mount -t tmpfs tmpfs "$NEW"
for each in /*; do
    if [ -L "$each" ]; then cp -P "$each" "$NEW"
    elif [ -d "$each" ]; then mkdir "$NEW$each"; mount --rbind "$each" "$NEW$each"; fi
done
cd "$NEW"
pivot_root . mnt
exec"""


def test_h3_a_caller_in_a_root_folder_of_its_own_is_refused(user: OrdinaryUser) -> None:
    """As in a container: root has made it, but the user may change what is in there."""
    new = user.home / "root"
    new.mkdir(exist_ok=True)
    path = f"PYTHONPATH={REPOSITORY / 'src'}:{REPOSITORY}"
    himself = shlex.join([*user.as_himself(), "env", path, sys.executable, "-c", CLIENT + "ask(Ask())"])
    done = subprocess.run(
        user.enter([*BY_ROOT, f"{ANOTHER_ROOT} {himself}"]),
        env={**user.environment, "NEW": str(new)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[:2] == ["refused", "the caller has a root folder of its own"]


def test_h3_root_needs_no_helper(machine: Machine) -> None:
    environment = {**os.environ, "GPUCR_HELPER": str(machine.socket)}
    path = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    words = [sys.executable, "-c", CLIENT + "ask(Ask())"]
    done = subprocess.run(machine.user.enter(words), env={**environment, **path}, capture_output=True, check=True)
    assert json.loads(done.stdout)[:2] == ["refused", "root needs no helper"]


# --- H5 to H7 ----------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(user: OrdinaryUser) -> Iterator[Path]:
    """The snapshot of a job with a connection, which has ended."""
    pid = start(user, "job", CONNECTED)
    dump(user, "job", pid)
    yield user.home / "snap"
    wait_until(lambda: not runs(pid), "nothing of it to be left")


def restored_by_force(
    machine: Machine, user: OrdinaryUser, images: Path, leave_at: str = "", keeper: int = 0
) -> tuple[str, str]:
    """The answer to a client that sends the snapshot unchecked, and stops or disconnects at a hook."""
    script = """
    from gpucr.helper.client import _opened
    from gpucr.helper.opened import OpenedFiles
    folder = Path(sys.argv[1])
    log = os.open("log", os.O_WRONLY | os.O_CREAT, 0o600)
    images = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        files = OpenedFiles.of(folder).fds
    except Exception:
        files = {}
    keeper = int(sys.argv[3])
    connection.send(Restore(False, (), len(files), keeper), (images, log, *((null,) * (0 if keeper else 3))))
    for number, fd in files.items():
        connection.send(Files((number,)), [fd])
    hooks = []
    while True:
        try:
            reply, _ = connection.receive(Here, Hook, Done, Failed)
        except HungUp:
            print(json.dumps(["hung up", "", hooks])); break
        if isinstance(reply, Hook) and reply.name == sys.argv[2]:
            print(json.dumps(["left", "", []]), flush=True)
            os._exit(0)
        if isinstance(reply, Hook):
            connection.send(Answer(bool(sys.argv[2])))
        if isinstance(reply, Failed):
            print(json.dumps([reply.because, reply.message, hooks])); break
    """
    answer = as_client(user, script, images, leave_at, keeper)
    wait_until(lambda: machine.left_at_work() == [], "the helper to end")
    return answer


_CHANGES = ["flipped", "longer", "shorter", "missing", "pipe", "folder", "linked", "unsigned"]


@pytest.mark.parametrize("change", sample(_CHANGES, 8))
def test_h5_changed_images_are_not_restored(machine: Machine, user: OrdinaryUser, snapshot: Path, change: str) -> None:
    image = next((snapshot / "images").glob("core-*.img"))
    data = image.read_bytes()
    if change == "unsigned":
        (snapshot / "images" / SIGNATURE_NAME).unlink()
    else:
        image.unlink()
    if change == "flipped":
        image.write_bytes(bytes((*data[:-1], data[-1] ^ 1)))
    elif change == "longer":
        image.write_bytes(data + b"\0")
    elif change == "shorter":
        image.write_bytes(data[:-1])
    elif change == "linked":
        image.symlink_to("/etc/shadow")
    elif change == "pipe":
        os.mkfifo(image)
    elif change == "folder":
        image.mkdir()
    because, message = restored_by_force(machine, user, snapshot / "images")
    assert because == "refused", message
    assert ("signature" if change == "unsigned" else "image") in message
    code, _ = user.refused("restore", "snap")
    assert code in ("GPUCR-SNAPSHOT-DAMAGED", "GPUCR-NOT-PERMITTED", "GPUCR-HELPER-REFUSED", "GPUCR-UNTRUSTED-SNAPSHOT")


def test_h5_added_images_are_not_read(machine: Machine, user: OrdinaryUser, snapshot: Path) -> None:
    (snapshot / "images" / "netns-1.img").write_bytes(b"x")
    assert restored_by_force(machine, user, snapshot / "images")[0] == "stopped"  # by its client, at the first hook


def test_h5_images_of_two_dumps_are_not_mixed(machine: Machine, user: OrdinaryUser, snapshot: Path) -> None:
    user.succeeds("restore", "snap")
    pid = user.pid_of("job")
    dump(user, "job", pid, "snap2")
    for path in (user.home / "snap2" / "images").glob("pages-*.img"):
        (snapshot / "images" / path.name).write_bytes(path.read_bytes())
    assert restored_by_force(machine, user, snapshot / "images")[0] == "refused"


def test_h6_another_machines_key_is_not_trusted(machine: Machine, user: OrdinaryUser, snapshot: Path) -> None:
    key = machine.keys / "own.key"
    before = key.read_text()
    key.write_text("ab" * 32 + "\n")
    try:
        because, message = restored_by_force(machine, user, snapshot / "images")
        assert because == "refused"
        assert "does not know" in message
    finally:
        key.write_text(before)


def test_h7_a_file_the_user_may_not_open_is_not_reopened(user: OrdinaryUser) -> None:
    pid = start(user, "job", CONNECTED + "opened = open('data', 'wb')\n")
    dump(user, "job", pid)
    data = user.home / "data"
    data.unlink()
    data.symlink_to("/etc/shadow")
    _, said = user.refused("restore", "snap", "--force")
    assert "data" in said
    assert not runs(pid)
    data.unlink()
    data.write_bytes(b"")
    os.chown(data, 0, 0)
    data.chmod(0o600)
    _, said = user.refused("restore", "snap", "--force")
    assert "data, which the job had open, cannot be opened" in said
    assert not runs(pid)
    data.unlink()


def test_h7_a_client_must_pass_every_file_of_the_job(machine: Machine, user: OrdinaryUser, snapshot: Path) -> None:
    path = snapshot / "images" / "files.img"
    script = f"""
    log = os.open("log", os.O_WRONLY | os.O_CREAT, 0o600)
    images = os.open("{path.parent}", os.O_RDONLY | os.O_DIRECTORY)
    connection.send(Restore(False, (), 1, 0), (images, log, 0, 0, 0))
    ask(Files((99999,)), (0,))
    """
    because, message = as_client(user, script)
    assert because == "refused"
    assert "not those of the job" in message


# --- H8, H9 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "said"), [("/etc", "caller's own"), ("/proc/self", "file system"), ("/tmp", "own")])
def test_h8_images_are_written_only_to_the_callers_own_folder(
    user: OrdinaryUser, idle: int, folder: str, said: str
) -> None:
    before = set(os.listdir("/etc"))
    because, message = as_client(user, "a_dump(int(sys.argv[1]), sys.argv[2])", idle, folder)
    assert because == "refused"
    assert said in message
    assert set(os.listdir("/etc")) == before


def test_h8_links_instead_of_images_are_not_followed(machine: Machine, user: OrdinaryUser, idle: int) -> None:
    victim = machine.folder / "victim"
    victim.write_text("as it was")
    script = """
    os.makedirs("images")
    for name in ("inventory.img", "files.img", "pstree.img", "stats-dump", "gpucr-helper.json"):
        os.symlink(sys.argv[2], os.path.join("images", name))
    a_dump(int(sys.argv[1]))
    """
    assert as_client(user, script, idle, victim)[0] == "Done"
    assert victim.read_text() == "as it was"
    assert victim.stat().st_uid == 0
    images = user.home / "images"
    assert stat.S_ISREG((images / "inventory.img").lstat().st_mode)
    assert {path.lstat().st_uid for path in images.iterdir()} == {user.uid}


WATCHING = (
    CONNECTED
    + """
import ctypes
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
assert libc.inotify_add_watch(watch, b".", 2) > 0
"""
)
PIPE = CONNECTED + "os.path.exists('pipe') or os.mkfifo('pipe')\nopened = os.open('pipe', os.O_RDWR)\n"


@pytest.mark.parametrize(
    ("program", "said"),
    [later(WATCHING, ""), (PIPE, "named pipe")],
    ids=["watch", "pipe"],
)
def test_h9_the_helper_dumps_only_what_it_restores(
    machine: Machine, user: OrdinaryUser, program: str, said: str
) -> None:
    pid = start(user, "job", program)
    code, message = user.refused("dump", "job", "--to", "snap", "--force")
    assert code == "GPUCR-HELPER-REFUSED" or not said, message  # CRIU itself may not get as far, as the user
    assert said in message
    count = counted(user, "job")
    wait_until(lambda: counted(user, "job") > count, "the job to continue")
    assert runs(pid)
    assert not (user.home / "snap").exists()
    assert machine.left_at_work() == []


# --- H11 to H15 --------------------------------------------------------------------------------------------------


def test_h11_the_helper_has_its_own_keyring() -> None:
    script = """
    import ctypes
    from gpucr.privileged.inheritance import _KEYCTL, leave_keyring
    import os
    libc = ctypes.CDLL(None)
    number = _KEYCTL[os.uname().machine]
    before = libc.syscall(number, 0, -3, 1)
    leave_keyring()
    print(before != libc.syscall(number, 0, -3, 1) or before == -1)
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "True\n"
    assert inheritance.KEEPER_MODULE


def test_h13_a_disconnected_clients_dump_is_undone(machine: Machine, user: OrdinaryUser) -> None:
    pid = start(user, "job", CONNECTED)
    script = """
    os.makedirs("images", exist_ok=True)
    images, log = os.open("images", os.O_RDONLY | os.O_DIRECTORY), os.open("log", os.O_WRONLY | os.O_CREAT, 0o600)
    pid = int(sys.argv[1])
    connection.send(Dump(pid, processes.read_stat(pid).start_time_ticks, False, 1 << 20, 0), (images, log))
    while True:
        reply, _ = connection.receive(Here, Hook, Done, Failed)
        if isinstance(reply, Hook) and reply.name == "post-dump":
            print(json.dumps(["left", "", []]), flush=True)
            os._exit(0)
        if isinstance(reply, Hook):
            connection.send(Answer(True))
    """
    assert as_client(user, script, pid)[0] == "left"
    wait_until(lambda: machine.left_at_work() == [], "the helper to end")
    count = counted(user, "job")
    wait_until(lambda: counted(user, "job") > count, "the job to continue")
    assert not list((user.home / "images").glob(".gpucr-helper*"))


@pytest.mark.parametrize("hook", [later("post-restore"), later("pre-restore"), "pre-resume"])
def test_h13_a_disconnected_clients_restore_is_undone(machine: Machine, user: OrdinaryUser, hook: str) -> None:
    dump(user, "job", start(user, "job", WITH_FILES))  # the ports of connections would stay taken for a minute
    count = counted(user, "job")
    assert restored_by_force(machine, user, user.home / "snap" / "images", hook)[0] == "left"
    assert counted(user, "job") == count
    user.succeeds("restore", "snap")  # its pid is free
    wait_until(lambda: counted(user, "job") > count, "the restored job to count on")
    os.kill(user.pid_of("job"), signal.SIGKILL)
    wait_until(lambda: not runs_any(user, "job"), "the job to end")


def runs_any(user: OrdinaryUser, name: str) -> bool:
    listed = json.loads(user.succeeds("jobs", "--json"))["jobs"]
    return any(each["name"] == name and each["state"] == "running" for each in listed)


def test_h13_a_helper_killed_by_its_user_leaves_no_root_process(machine: Machine, user: OrdinaryUser) -> None:
    pid = start(user, "job", CONNECTED)
    script = """
    os.makedirs("images", exist_ok=True)
    images, log = os.open("images", os.O_RDONLY | os.O_DIRECTORY), os.open("log", os.O_WRONLY | os.O_CREAT, 0o600)
    pid = int(sys.argv[1])
    connection.send(Dump(pid, processes.read_stat(pid).start_time_ticks, False, 1 << 20, 0), (images, log))
    while True:
        reply, _ = connection.receive(Here, Hook, Done, Failed)
        if isinstance(reply, Here):
            helper = reply.pid
        elif reply.name == "pre-dump":
            try:
                open(f"/proc/{helper}/mem", "rb").close()
                print(json.dumps(["can be traced", "", []]), flush=True)
                os._exit(0)
            except PermissionError:
                os.kill(helper, 9)
                print(json.dumps(["killed", "", []]), flush=True)
                os._exit(0)
        else:
            connection.send(Answer(True))
    """
    assert as_client(user, script, pid)[0] == "killed"
    images = user.home / "images"
    wait_until(lambda: not list(images.glob(".gpucr-helper*")), "what it has left to be removed")
    count = counted(user, "job")
    wait_until(lambda: counted(user, "job") > count, "the job to continue")
    assert runs(pid)


def test_h14_concurrent_requests_are_limited_per_user(user: OrdinaryUser) -> None:
    script = f"""
    held = [_connected(Path(os.environ["GPUCR_HELPER"])) for _ in range({MAX_REQUESTS_PER_USER + 1})]
    poller = select.poll()
    for each in held:
        poller.register(each.socket, select.POLLIN)
    refused = poller.poll(60_000)  # the served ones wait for a request; one of another test may be about to end
    last = next(each for each in held if each.socket.fileno() == refused[0][0])
    print(json.dumps([(reply := last.receive(Failed)[0]).because, reply.message, []]))
    """
    because, message = as_client(user, script)
    assert because == "refused"
    assert "served already" in message
    wait_until(lambda: as_client(user, "ask(Ask())")[0] == "Here", "those to have ended")


def test_h15_a_socket_not_owned_by_root_is_not_used(user: OrdinaryUser) -> None:
    script = "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind('fake'); s.listen(); open('alive', 'w').close(); s.accept(); input()"  # noqa: E501
    (user.home / "fake").unlink(missing_ok=True)
    (user.home / "alive").unlink(missing_ok=True)
    pid = user.start(sys.executable, "-c", script)
    wait_until((user.home / "alive").exists, "it to listen")
    before = user.environment["GPUCR_HELPER"]
    user.environment["GPUCR_HELPER"] = str(user.home / "fake")
    try:
        code, said = user.refused("helper", "status")
    finally:
        user.environment["GPUCR_HELPER"] = before
        kill_at_once([pid])  # it ends by itself when somebody has connected
    assert code == "GPUCR-HELPER"
    assert "does not belong to root" in said
