"""The agent's socket: who is served, what is refused, and what happens to a job whose client disconnects."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpucr import suspend
from gpucr.errors import GpucrError
from gpucr.interposer import client
from gpucr.interposer.client import Agent, Held, ask_blocks, ask_devices, ask_status
from gpucr.interposer.foreign import is_lost_by_driver, why_by_driver
from gpucr.interposer.place import socket_path
from gpucr.interposer.protocol import (
    MOST_BYTES,
    Answer,
    BadAnswer,
    Code,
    Flag,
    Kept,
    Operation,
    OtherVersion,
    Refused,
    parse,
    request,
)
from gpucr.sim import build as simulator
from tests.conftest import MakeMachine
from tests.interposer.conftest import Job, Start, taken
from tests.sim.libcuda import Libcuda
from tests.storm import long

pytestmark = pytest.mark.in_turn

MIB = 1 << 20


def test_memory_is_kept_outside_the_process_during_the_drivers_checkpoint(job: Callable[..., Job]) -> None:
    process, driver = job(5 * MIB, 4096, 1100 * MIB), Libcuda()
    with Agent(process.pid) as agent:
        status = agent.status()
        assert (status.blocks, status.block_bytes, status.small, status.small_bytes) == (3, 1106 * MIB, 1, 4096)
        for _ in range(2):
            held = taken(agent)
            driver.suspend(process.pid)
            driver.resume(process.pid)
            agent.give_back(held, renew=True)
            agent.open_gate()
            assert process.is_right()


def test_memory_that_came_back_by_a_descriptor_leaves_by_it_again_and_again(job: Callable[..., Job]) -> None:
    """The driver does not export imported memory, so the process keeps the descriptor."""
    process, driver = job(5 * MIB, 1100 * MIB), Libcuda()
    with Agent(process.pid) as agent:
        for _ in range(4):
            held = taken(agent)
            assert all(each.block.descriptor == -1 for each in held), "it is not one of what processes share"
            driver.suspend(process.pid)
            driver.resume(process.pid)
            agent.give_back(held, renew=False)
            assert (agent.status().blocks, agent.status().stuck) == (3, 0)
            assert (agent.status().foreign, agent.status().captive) == (3, 0)
            assert [each.flags for each in agent.blocks()] == [Flag.RETURNED] * 3
            agent.open_gate()
            assert process.is_right()


def test_the_programs_free_numbers_for_descriptors_stay_free(job: Callable[..., Job]) -> None:
    """They are kept behind its soft limit, which is as it was afterwards."""
    process = job(*[2 * MIB] * 300, prefix=("prlimit", "--nofile=400:2000"))
    with Agent(process.pid) as agent:
        agent.give_back(taken(agent), renew=False)
        assert (agent.status().foreign, agent.status().captive) == (300, 0)
        agent.open_gate()
    numbers = sorted(map(int, os.listdir(f"/proc/{process.pid}/fd")))
    assert len([number for number in numbers if number >= 400]) == 300
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (400, 2000)
    assert process.is_right()


HIGH_NUMBERS_ARE_TAKEN = (
    "prlimit", "--nofile=400:400",
    "bash", "-c", 'for n in {200..399}; do eval "exec $n</dev/null"; done; exec "$@"', "bash",
)  # fmt: skip


@long
def test_without_a_free_number_memory_is_renewed(job: Callable[..., Job]) -> None:
    process = job(5 * MIB, 1100 * MIB, prefix=HIGH_NUMBERS_ARE_TAKEN)
    with Agent(process.pid) as agent:
        for _ in range(3):
            agent.give_back(taken(agent), renew=False)
            status = agent.status()
            assert (status.blocks, status.stuck, status.foreign, status.captive) == (3, 0, 0, 0)
            agent.open_gate()
            assert process.is_right()


def test_memory_without_a_number_and_without_room_is_known_to_be_captive(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_SIM_GPUS", "1x100MiB")
    process = job(40 * MIB, 50 * MIB, prefix=HIGH_NUMBERS_ARE_TAKEN)
    with Agent(process.pid) as agent:
        agent.give_back(taken(agent), renew=False)
        status = agent.status()
        assert (status.stuck, status.foreign, status.captive) == (2, 2, 2)
        assert is_lost_by_driver(status, by_interposer=True), "so it is refused"
        agent.open_gate()
    assert process.is_right()
    with pytest.raises(GpucrError, match="imported"):
        suspend(process.pid)
    assert process.is_right()


def test_a_client_that_disconnects_before_any_drop_leaves_the_job_running(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    with Agent(process.pid) as agent:
        assert agent.close_gate(5).is_empty
        for batch in agent.export():
            for each in batch:
                each.close()
    assert process.is_right()


def test_dropped_memory_keeps_the_gate_closed_for_the_next_client(job: Callable[..., Job]) -> None:
    process = job(5 * MIB, 3 * MIB)
    with Agent(process.pid) as agent:
        held = taken(agent)
    with Agent(process.pid) as agent:
        assert (agent.status().gate_closed, agent.status().away) == (1, 2)
        with pytest.raises(Refused, match="memory is away"):
            agent.open_gate()
        agent.give_back(held, renew=True)
        agent.open_gate()
    assert process.is_right()


def test_one_client_at_a_time(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    with Agent(process.pid) as first:
        assert first.close_gate(5).is_empty
        with pytest.raises(Refused, match="busy"):
            Agent(process.pid)
    with Agent(process.pid) as second:
        assert second.status().gate_closed == 0


def test_a_second_client_waits_for_a_read_only_one(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    process = job(5 * MIB)
    first = Agent(process.pid)
    monkeypatch.setattr("gpucr.interposer.client.time.sleep", lambda seconds: first.close())
    with Agent(process.pid) as second:
        assert second.status().blocks == 1


def test_questions_are_answered_unless_it_is_stopped(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LOOK_S", 0.1)
    process = job(5 * MIB, 4096)
    status = ask_status(process.pid)
    assert status is not None
    assert (status.blocks, status.small, status.gate_closed) == (1, 1, 0)
    with Agent(process.pid) as agent:
        assert agent.close_gate(1).is_empty
        told = ask_status(process.pid)
        assert told is not None, "also while somebody works on it"
        assert (told.blocks, told.gate_closed) == (1, 1)
        assert ask_blocks(process.pid) == agent.blocks()
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert ask_status(process.pid) is None, "it is stopped, and does not answer"
    os.kill(process.pid, signal.SIGCONT)
    assert process.is_right()
    assert ask_status(os.getpid()) is None


NONSENSE = """
import os, socket, struct, sys
folder = os.environ["GPUCR_INTERPOSER_DIR"]
os.mkdir(folder, 0o700)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(f"{folder}/{os.getpid()}.{os.stat('/proc/self/ns/pid').st_ino}")
listener.listen()
print("ready", flush=True)
version_2 = struct.pack("<IHHIIQQ", 0x49555047, 2, 1, 0, 0, 0, 0)
for answer in (b"", b"x", bytes(32), bytes(100), os.urandom(5000), version_2, version_2):
    client, _ = listener.accept()
    client.recv(5000)
    if answer:
        client.send(answer)
    client.close()
"""


def test_an_agent_with_invalid_answers_is_ignored(start: Start) -> None:
    process = start(sys.executable, "-c", NONSENSE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert [ask_status(process.pid) for _ in range(6)] == [None] * 6
    with pytest.raises(OtherVersion, match="speaks version 2 of the protocol, this gpucr version 1"):
        Agent(process.pid)
    assert process.wait(10) == 0


def test_requests_that_need_a_closed_gate_are_refused_while_it_is_open(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    with Agent(process.pid) as agent:
        with pytest.raises(Refused, match="gate not closed"):
            agent.drop()
        with pytest.raises(Refused, match="gate not closed"):
            list(agent.export())
    assert process.is_right()


def test_more_blocks_than_the_descriptor_limit(job: Callable[..., Job]) -> None:
    process = job(*[2 * MIB] * 400, prefix=("prlimit", "--nofile=480:480"))  # the simulator takes one for each
    with Agent(process.pid) as agent:
        held = taken(agent)
        assert len(held) == 400
        agent.give_back(held, renew=True)
        agent.open_gate()
    assert process.is_right()


def connected(process: Job) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(10)
    link.connect(str(socket_path(process.pid)))
    return link


def test_garbage_is_refused_and_changes_nothing(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    chance = random.Random(15)  # noqa: S311
    whole = request(Operation.STATUS)
    packets = [whole[:n] for n in range(1, len(whole))] + [whole + b"x", request(Operation.HELLO) + bytes(31)]
    packets += [chance.randbytes(chance.randrange(1, 2 * MOST_BYTES)) for _ in range(200)]
    packets += [struct.pack("<IHHIIQQ", 0x49555047, 1, kind, 0, 4096, 0, 0) for kind in range(12)]
    with connected(process) as link:
        for packet in packets:
            link.send(packet)
            assert parse(link.recv(MOST_BYTES), Operation.HELLO).code == Code.MALFORMED
        link.send(struct.pack("<IHHIIQQ", 0x49555047, 2, Operation.HELLO, 0, 0, 0, 0))
        assert struct.unpack_from("<I", link.recv(MOST_BYTES), 8)[0] == Code.WRONG_VERSION
        link.send(struct.pack("<IHHIIQQ", 0x49555047, 1, 77, 0, 0, 0, 0))
        assert parse(link.recv(MOST_BYTES), Operation.HELLO).code == Code.MALFORMED
    assert process.is_right()


def test_a_process_keeps_two_objects_and_releases_both_at_once(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    with Agent(process.pid) as agent:
        assert agent.close_gate(5).is_empty
        for number, what in enumerate(Kept):
            fd = os.memfd_create("kept")
            os.write(fd, bytes([number]))
            agent.keep(fd, what)
            os.close(fd)
    with Agent(process.pid) as agent:
        assert agent.status().gate_closed, "as long as it keeps something"
        for number, what in enumerate(Kept):
            found = agent.fetch(what)
            assert found is not None
            assert os.pread(found, 9, 0) == bytes([number])
            os.close(found)
        agent.keep(None)
        assert [agent.fetch(what) for what in Kept] == [None, None]
    assert process.is_right()


def test_impossible_keeps_and_drops_are_refused(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    with connected(process) as link:
        packets = [(Operation.CLOSE, 1000), (Operation.KEEP, 2), (Operation.FETCH, 2), (Operation.DROP, 3)]
        codes = []
        for operation, number in packets:
            link.send(request(operation, number))
            codes.append(parse(link.recv(MOST_BYTES), operation).code)
    assert codes == [Code.DONE, *[Code.MALFORMED] * 3]
    assert process.is_right()


def test_unrequested_descriptors_are_closed(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    with connected(process) as link, Path(os.devnull).open() as nothing:
        link.send(request(Operation.HELLO))
        link.recv(MOST_BYTES)
        before = len(os.listdir(f"/proc/{process.pid}/fd"))
        for _ in range(20):
            socket.send_fds(link, [request(Operation.HELLO)], [nothing.fileno()] * 100)
            link.recv(MOST_BYTES)
        assert len(os.listdir(f"/proc/{process.pid}/fd")) == before


def test_foreign_descriptors_and_unknown_blocks_restore_nothing(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    with Agent(process.pid) as agent:
        held = taken(agent)
        with Path(os.devnull).open() as nothing, pytest.raises(Refused) as refused:
            agent.give_back([Held(held[0].block, os.dup(nothing.fileno()))], renew=True)
        assert refused.value.result == 1
        unknown = Held(replace(held[0].block, index=99), os.dup(held[0].descriptor))
        with pytest.raises(Refused, match="unknown block"):
            agent.give_back([unknown], renew=True)
        assert agent.status().away == 1
        agent.give_back(held, renew=True)
        agent.open_gate()
    assert process.is_right()


def test_forked_children_inherit_no_memory(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    with Agent(process.pid) as agent:
        agent.give_back(taken(agent), renew=True)
        agent.open_gate()
        assert process.say("fork") == "0"
    assert process.is_right()


def test_the_socket_is_in_a_private_folder(job: Callable[..., Job], tmp_path: Path) -> None:
    process = job(5 * MIB)
    folder = socket_path(process.pid).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="private folder"):
        Agent(process.pid)


def test_another_process_listening_in_its_place_is_not_trusted(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    path = socket_path(process.pid)
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
        impostor.bind(str(path))
        impostor.listen()
        with Agent(process.pid) as agent:  # by its other name; and it has taken this one again
            assert agent.status().blocks == 1
        with connected(process) as link:
            peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            assert struct.unpack("3i", peer)[0] == process.pid


def test_no_socket_outlives_its_process(job: Callable[..., Job], agents: Path) -> None:
    killed, other = job(5 * MIB), job(5 * MIB)
    killed.process.kill()
    killed.process.communicate()
    assert len(list(agents.iterdir())) == 2 * 2
    third = job(5 * MIB)
    other.process.communicate(timeout=10)  # its input ends, and it with it
    assert other.process.returncode == 0
    name = socket_path(third.pid).name
    found, bound = sorted(each.name for each in agents.iterdir())
    assert (found, bound.rpartition(".")[0]) == (name, name)


def test_nothing_happens_in_a_program_without_cuda(start: Start, agents: Path) -> None:
    process = start("sh", "-c", "cat /proc/self/status | grep Threads")
    assert process.communicate(timeout=10)[0].split() == ["Threads:", "1"]
    assert not agents.exists()


def test_a_thread_waiting_at_the_drivers_lock_is_inside(job: Callable[..., Job]) -> None:
    process, driver = job(5 * MIB), Libcuda()
    assert driver.lock(process.pid) == 0
    assert process.process.stdin is not None
    process.process.stdin.write("check\n")
    process.process.stdin.flush()
    with Agent(process.pid) as agent:
        while agent.status().inside == 0:
            pass
        closed = agent.close_gate(0)
        assert (closed.inside, closed.thread) == (1, process.pid)
        assert closed.pending == f"was in {closed.function} (thread {process.pid})"
        assert closed.function.startswith("cuMem")
        assert driver.act("unlock", process.pid) == 0
        assert agent.close_gate(5).is_empty  # it left; its next call waits in front of the gate
        agent.open_gate()
    assert process.process.stdout is not None
    assert process.process.stdout.readline().strip() == "right"


AROUND = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
if sys.argv[1] == "deepbind":
    ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
elif sys.argv[1] == "dlmopen":
    load = ctypes.CDLL(None).dlmopen
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
    assert load(-1, b"libm.so.6", os.RTLD_NOW)  # a namespace of its own
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("name", ["libcuda.so", "cuda-driver"])
def test_a_program_may_load_the_driver_under_another_name(
    start: Start, sim_only: None, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).symlink_to(simulator.build() / "libcuda.so.1")
    process = start(sys.executable, "-c", AROUND.replace("libcuda.so.1", str(tmp_path / name)), "plain")
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    with Agent(process.pid) as agent:
        assert agent.status().block_bytes == 4 << 20


@pytest.mark.parametrize(("way", "around"), [("plain", 0), ("deepbind", 1), ("dlmopen", 1)])
def test_a_process_whose_calls_may_bypass_the_gate_reports_it(
    start: Start, sim_only: None, way: str, around: int
) -> None:
    process = start(sys.executable, "-c", AROUND, way)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    with Agent(process.pid) as agent:
        assert agent.status().around == around
    status = ask_status(process.pid)
    assert status is not None
    assert (why_by_driver(status) is None) == (around == 0)
    if around:
        with pytest.raises(GpucrError, match="may come to the driver around the gate"):
            suspend(process.pid, gpu_state="interposed")


@pytest.mark.parametrize(("visible", "order"), [(None, [0, 1]), ("1,0", [1, 0]), ("1", [1])])
def test_it_names_the_devices_that_cuda_shows(
    visible: str | None,
    order: list[int],
    job: Callable[..., Job],
    machine: MakeMachine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uuids = machine("2x64MiB")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    process = job(MIB)
    assert ask_devices(process.pid) == tuple(uuids[index] for index in order)
    with Agent(process.pid) as agent:  # also while it has a client, and while the memory is away
        taken(agent)
        assert ask_devices(process.pid) == tuple(uuids[index] for index in order)


@pytest.mark.parametrize(("count", "size"), [(1, 0), (1, 15), (0, 16), (65, 65 * 16), (2**63, 16)])
def test_a_list_of_devices_of_another_length(count: int, size: int) -> None:
    with pytest.raises(BadAnswer, match="list of devices"):
        Answer(0, count, 0, 0, bytes(size)).devices()
