"""A job on two nodes is dumped and restored together, or not at all."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from gpucr.linux import processes
from tests import command
from tests.counter import wait_until
from tests.nodes.two_nodes import ADDRESSES, RENDEZVOUS_PORT, SECRET, TwoNodes, ended
from tests.storm import later, long, sample

pytestmark = pytest.mark.criu


def test_a_job_is_dumped_ended_and_restored(nodes: TwoNodes) -> None:
    made = nodes.dump()
    assert [(each["node"], each["node_count"], each["set_name"]) for each in made] == [(0, 2, "set"), (1, 2, "set")]
    assert all(node.is_gone() for node in nodes.nodes)
    assert [(each["name"], each["complete"]) for each in nodes.listed()] == [("set", True)] * 2
    assert {each["part"]["set_id"] for each in nodes.listed()} == {made[0]["set_id"]} == {made[1]["set_id"]}
    back = nodes.restore()
    assert [each["pid"] for each in back] == [node.pid for node in nodes.nodes]
    nodes.assert_job_goes_on()
    assert sum("connected" in line for line in nodes.nodes[1].lines()) == 1
    nodes.finish()


def test_a_job_left_running_keeps_its_connections(nodes: TwoNodes) -> None:
    made = nodes.dump("--leave-running")
    assert [each["left_running"] for each in made] == [True, True]
    nodes.assert_job_goes_on()
    assert sum("connected" in line for line in nodes.nodes[1].lines()) == 1
    nodes.finish()


@long
def test_the_latest_set_of_a_name_is_restored(nodes: TwoNodes) -> None:
    nodes.dump("--leave-running")
    nodes.assert_job_goes_on()
    second = nodes.dump()
    back = nodes.restore()
    assert [each["set_id"] for each in back] == [second[0]["set_id"]] * 2
    nodes.assert_job_goes_on()
    nodes.finish()


def test_a_set_is_not_a_snapshot_of_one_node(nodes: TwoNodes) -> None:
    nodes.dump()
    refused = command.run("restore", f"{nodes.store}#set")
    assert refused.returncode == 2
    assert "is a set of 2 nodes" in refused.stderr
    assert "gpucr nodes restore" in refused.stderr
    for node in nodes.nodes:
        node.reap()
    started = [nodes.start_restore(node, nodes=3 if node == 0 else 2) for node in range(2)]
    (code, _, said), (other, _, said_there) = map(ended, started)
    assert (code, other) == (2, 1)
    assert "is of 2 nodes, and 3 are to restore it" in said
    assert "takes part in 2 nodes, and node 0 in 3" in said_there
    removed = command.run_json("rm", f"{nodes.store}#set")["removed"]
    assert [each["part"]["node"] for each in removed] == [0, 1]
    assert nodes.listed() == []


# --- what goes wrong before all have saved ----------------------------------------------------------------------

UNDECIDED = ["lock", "checkpoint", "prepare", "dump", "save", "before:_settle"]
"""While it is frozen, when all are frozen, while it is saved, and when it has saved but told nobody."""


@pytest.mark.parametrize(("moment", "victim"), sample(list(itertools.product(UNDECIDED, [0, 1])), 99))
def test_if_a_node_dies_before_all_have_saved_the_job_continues(nodes: TwoNodes, victim: int, moment: str) -> None:
    dead = nodes.drive(victim, moment, "die")
    other = nodes.start_dump(1 - victim)
    assert ended(dead)[0] == -signal.SIGKILL
    code, _, said = ended(other)
    assert code == 1
    assert "code:  GPUCR-NODE-FAILED" in said
    nodes.assert_job_goes_on()
    left = nodes.listed()
    assert [each["complete"] for each in left] == [False] * len(left)
    nodes.finish()


@pytest.mark.parametrize("moment", ["before:complete", later("before:wait")])
def test_if_a_node_dies_before_the_set_is_complete_the_job_continues(nodes: TwoNodes, moment: str) -> None:
    """Node 0 knows that all have saved, and dies; node 1 has reported that it has saved, and dies."""
    victim = 0 if moment == "before:complete" else 1
    if victim == 0:
        dead, other = nodes.drive(0, moment, "die"), nodes.start_dump(1)
    else:
        other, dead = nodes.drive(0, "before:complete", "pause"), nodes.drive(1, moment, "die")
    assert ended(dead)[0] == -signal.SIGKILL
    if victim == 0:
        code, _, said = ended(other)
        assert code == 1
        assert "GPUCR-NODE-FAILED" in said
        nodes.assert_job_goes_on()
        assert [each["complete"] for each in nodes.listed()] == [False]
        left = nodes.listed()[0]["id"]
        refused = command.run("restore", f"{nodes.store}#{left}")
        assert (refused.returncode, "code:  GPUCR-SET-UNFINISHED" in refused.stderr) == (5, True)
        refused = command.run("inspect", f"{nodes.store}#set")
        assert (refused.returncode, "code:  GPUCR-SET-UNFINISHED" in refused.stderr) == (5, True)
        assert "0 of 2, unfinished" in command.run("ls", nodes.store).stdout
        pruned = command.run_json("prune", nodes.store)
        assert [each["id"] for each in pruned["removed"]] == [left]
        assert nodes.listed() == []
    else:
        wait_until(lambda: nodes.nodes[0].is_gone() or (nodes.folder / "there-0").exists(), "node 0 to be there")
        nodes.let_go(0)  # all parts are saved: node 0 may complete the set
        assert ended(other)[0] == 0
        assert nodes.nodes[0].is_gone()
        assert [each["complete"] for each in nodes.listed()] == [True, True]
        nodes.nodes[1].kill_job()  # its guard let it run
        nodes.restore()
        nodes.assert_job_goes_on()
    nodes.finish()


def test_a_failed_set_leaves_the_previous_one(nodes: TwoNodes) -> None:
    first = nodes.dump("--leave-running")
    nodes.drive(1, "save", "die")
    code, _, _ = ended(nodes.start_dump(0))
    assert code == 1
    nodes.assert_job_goes_on()
    for node in nodes.nodes:
        node.kill_job()
    assert [each["set_id"] for each in nodes.restore()] == [first[0]["set_id"]] * 2
    nodes.finish()


@long
def test_a_disconnected_node_is_noticed(nodes: TwoNodes) -> None:
    started = [nodes.start_dump(0), nodes.drive(1, "before:_settle", "pause")]
    nodes.wait_there(1)
    nodes.nodes[1].cut_off()
    nodes.let_go(1)
    done = [ended(each) for each in started]
    assert [code for code, _, _ in done] == [1, 1]
    assert all("GPUCR-NODE-FAILED" in said for _, _, said in done)
    assert nodes.listed() == []
    nodes.nodes[1].ip("link", "set", "eth", "up")
    nodes.assert_job_goes_on()
    nodes.finish()


@long
def test_the_others_continue_when_a_node_vanishes(nodes: TwoNodes) -> None:
    other = nodes.start_dump(0)
    nodes.drive(1, "save", "pause")
    nodes.wait_there(1)
    nodes.nodes[1].lose_power()
    assert ended(other)[0] == 1
    assert nodes.nodes[1].is_gone()
    states = {stat.status for pid in [nodes.nodes[0].pid] if (stat := processes.read_stat(pid))}
    assert "T" not in states
    assert nodes.listed() == []


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [later(0), 1])
def test_ctrl_c_while_waiting_for_the_other_node(nodes: TwoNodes, node: int) -> None:
    other = nodes.drive(1 - node, "prepare" if node else "lock", "pause")
    mine = nodes.start_dump(node)
    nodes.wait_there(1 - node)
    mine.send_signal(signal.SIGINT)
    code, _, said = ended(mine)
    assert code == 130
    assert "the job is as it was found" in said
    nodes.let_go(1 - node)
    code, _, said = ended(other)
    assert code == 1
    assert f"GPUCR-NODE-FAILED node {node} failed" in said
    nodes.assert_job_goes_on()
    assert nodes.listed() == []
    nodes.finish()


@pytest.mark.parametrize("how", [[], ["--leave-running"]], ids=["ended", "left running"])
def test_ctrl_c_while_the_other_node_does_not_hold_its_gpu_work(nodes: TwoNodes, how: list[str]) -> None:
    action = "dump and keep running" if how else "dump and end"
    code = f"""
import time
from pathlib import Path
from gpucr.nodes.parts import meeting_for
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.snapshot.location import open_store_for_jobs
from gpucr.store import sets
where = Rendezvous.at("{ADDRESSES[0]}:{RENDEZVOUS_PORT}", node=0, node_count=2, secret={SECRET!r}, meet_s=20)
with meeting_for(where, "{action}", open_store_for_jobs("{nodes.store}", None), "set", None) as meeting:
    meeting.arrive(sets.new_id)
    while 1 not in meeting._here["holding"]:
        time.sleep(0.01)
    Path("{nodes.folder}/waits").touch()
    meeting.together("frozen", time.monotonic() + 60)
"""
    other, mine = nodes.nodes[0].python(code), nodes.start_dump(1, *how)
    wait_until((nodes.folder / "waits").exists, "node 1 to wait for node 0")
    nodes.assert_job_goes_on()
    mine.send_signal(signal.SIGINT)
    assert ended(mine)[0] == 130
    assert "node 1 failed" in ended(other)[2]
    nodes.assert_job_goes_on()
    assert nodes.listed() == []
    nodes.finish()


def test_ctrl_c_on_a_node_that_has_saved_abandons_the_set(nodes: TwoNodes) -> None:
    host, guest = nodes.drive(0, "before:complete", "pause"), nodes.start_dump(1)
    nodes.wait_there(0)
    guest.send_signal(signal.SIGINT)
    assert ended(guest)[0] == 130
    nodes.let_go(0)
    code, _, said = ended(host)
    assert code == 1
    assert "another node has given the set up" in said
    nodes.assert_job_goes_on()
    assert nodes.listed() == []
    nodes.finish()


# --- when it is decided ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGINT, later(signal.SIGTERM)])
def test_a_node_interrupted_after_completion_ends_its_part(nodes: TwoNodes, how: signal.Signals) -> None:
    host, guest = nodes.drive(0, "before:announce", "pause"), nodes.start_dump(1)

    def is_complete() -> bool:
        return [each["complete"] for each in nodes.listed()] == [True, True]

    nodes.wait_there(0)  # all are frozen
    nodes.let_go(0)
    wait_until(is_complete, "the set to be complete")
    guest.send_signal(how)
    assert ended(guest)[0] == 0
    assert ended(host)[0] == 0
    assert all(node.is_gone() for node in nodes.nodes)
    nodes.restore()
    nodes.finish()


@pytest.mark.parametrize("moment", [later("after:complete"), "before:conclude", later("before:end")])
def test_if_node_0_dies_after_completion_the_others_end(nodes: TwoNodes, moment: str) -> None:
    host, guest = nodes.drive(0, moment, "die"), nodes.start_dump(1)
    assert ended(host)[0] == -signal.SIGKILL
    code, _, said = ended(guest)
    assert code == 0, said
    assert nodes.nodes[1].is_gone()
    assert [each["complete"] for each in nodes.listed()] == [True, True]
    nodes.nodes[0].kill_job()  # its guard let it run
    nodes.restore()
    nodes.assert_job_goes_on()
    nodes.finish()


@long
def test_the_store_vanishes_at_the_decision(nodes: TwoNodes) -> None:
    """The outcome is unknown: all parts run, and the store keeps what it has."""
    host, guest = nodes.drive(0, "before:complete", "pause"), nodes.start_dump(1)
    nodes.wait_there(0)
    (nodes.store_folder / "sets").touch()
    nodes.let_go(0)
    done = [ended(host), ended(guest)]
    assert [code for code, _, _ in done] == [5, 5], done
    assert all("it is not known whether the set" in said for _, _, said in done)
    nodes.assert_job_goes_on()
    (nodes.store_folder / "sets").unlink()
    assert [each["complete"] for each in nodes.listed()] == [False, False]
    nodes.finish()


# --- who does not belong there -----------------------------------------------------------------------------------


def test_a_node_with_another_secret_is_rejected(nodes: TwoNodes) -> None:
    (other := nodes.folder / "other").write_bytes(b"another secret, as long")
    other.chmod(0o600)
    host = nodes.start_dump(0, meet_within="3s")
    code, _, said = ended(nodes.start_dump(1, secret_file=other))
    assert (code, "code:  GPUCR-NODES-SECRET" in said) == (1, True)
    code, _, said = ended(host)
    assert (code, "code:  GPUCR-RENDEZVOUS" in said) == (1, True)
    assert f"{ADDRESSES[1]} has another secret" in said
    nodes.assert_job_goes_on()


def test_nobody_at_the_rendezvous(nodes: TwoNodes) -> None:
    code, _, said = ended(nodes.start_dump(1, meet_within="1s"))
    assert (code, "code:  GPUCR-RENDEZVOUS" in said) == (1, True)
    assert f"node 0 cannot be reached at {ADDRESSES[0]}" in said
    code, _, said = ended(nodes.start_dump(0, meet_within="1s"))
    assert (code, "node 1 did not come to the rendezvous within 1 s" in said) == (1, True)
    nodes.assert_job_goes_on()


def test_a_node_without_the_secret(nodes: TwoNodes) -> None:
    code, _, said = ended(nodes.start_dump(0, secret_file=None))
    assert (code, "no secret was given" in said) == (2, True)
    nodes.secret.chmod(0o644)
    code, _, said = ended(nodes.start_dump(0))
    assert (code, "is open to others (mode 644)" in said) == (2, True)
    nodes.secret.chmod(0o600)
    nodes.secret.write_bytes(b"short")
    code, _, said = ended(nodes.start_dump(0))
    assert (code, "could be guessed" in said) == (2, True)


@long
def test_nodes_with_different_requests(nodes: TwoNodes) -> None:
    done = [ended(each) for each in [nodes.start_dump(0), nodes.start_dump(1, name="other")]]
    assert [code for code, _, _ in done] == [1, 1]
    assert all("node 1 failed: it wants to dump and end" in said for _, _, said in done)
    done = [ended(each) for each in [nodes.start_dump(0), nodes.start_dump(1, node=0)]]
    assert 0 not in [code for code, _, _ in done]
    nodes.assert_job_goes_on()
    assert nodes.listed() == []


def start_with_nccl(nodes: TwoNodes, env: dict[str, str]) -> None:
    """Both parts again, with what shows that NCCL has a communicator."""
    for node in nodes.nodes:
        node.kill_job()
    library = nodes.folder / "libnccl.so.2"
    library.write_bytes(bytes(4096))
    for node in nodes.nodes:
        node.start_job(library, env=env)
    for node in nodes.nodes:
        node.works()


def test_nccl_over_sockets_is_kept(nodes: TwoNodes) -> None:
    start_with_nccl(nodes, {"NCCL_NET": "Socket"})
    nodes.dump()
    nodes.restore()
    nodes.assert_job_goes_on()
    assert sum("connected" in line for line in nodes.nodes[1].lines()) == 1
    nodes.finish()


def test_nccl_over_another_network_is_refused_on_both(nodes: TwoNodes) -> None:
    start_with_nccl(nodes, {"NCCL_NET": "IB"})
    done = [ended(each) for each in [nodes.start_dump(node) for node in range(2)]]
    assert {code for code, _, _ in done} <= {1, 3}
    said = next(said for code, _, said in done if code == 3)
    assert "NCCL_NET=IB was set" in said
    assert "start the job with NCCL_NET=Socket" in said
    assert "code:  GPUCR-NODES-NCCL" in said
    nodes.assert_job_goes_on()


# --- restore -----------------------------------------------------------------------------------------------------


def test_a_failed_restore_on_one_node_ends_all_parts(nodes: TwoNodes) -> None:
    nodes.dump("--leave-running")
    nodes.nodes[0].kill_job()  # and the pid of node 1 is taken
    started = [nodes.start_restore(node, "--json") for node in range(2)]
    (code, out, _), (other, _, said) = map(ended, started)
    assert (code, other) == (1, 3), said
    assert command.parsed(out)["code"] == "GPUCR-NODE-FAILED"
    assert nodes.nodes[0].is_gone()
    nodes.nodes[1].kill_job()
    nodes.restore()
    nodes.finish()


@pytest.mark.parametrize(("moment", "victim"), [later("criu", 0), ("criu", 1), later("wait", 0), later("wait", 1)])
def test_a_restore_leaves_nothing_when_the_other_node_dies(nodes: TwoNodes, victim: int, moment: str) -> None:
    nodes.dump()
    for node in nodes.nodes:
        node.reap()
    dead, other = nodes.drive(victim, moment, "die", is_restore=True), nodes.start_restore(1 - victim)
    assert ended(dead)[0] == -signal.SIGKILL
    code, _, said = ended(other)
    assert (code, "code:  GPUCR-NODE-FAILED" in said) == (1, True)
    wait_until(lambda: all(node.is_gone() for node in nodes.nodes), "both parts to be gone")
    nodes.restore()
    nodes.finish()


def test_a_missing_set(nodes: TwoNodes) -> None:
    started = [nodes.start_restore(node, name="nothing") for node in range(2)]
    done = [ended(each) for each in started]
    assert [code for code, _, _ in done] == [2, 2]
    assert all("holds no snapshot" in said for _, _, said in done)


def test_a_set_is_copied_to_another_store(nodes: TwoNodes, tmp_path: Path) -> None:
    made = nodes.dump()
    assert command.run("store", "init", tmp_path / "other").returncode == 0
    copied = command.run("copy", f"{nodes.store}#set", tmp_path / "other")
    assert copied.returncode == 0, copied.stderr
    nodes.store = tmp_path / "other"
    assert [each["complete"] for each in nodes.listed()] == [True, True]
    assert [each["set_id"] for each in nodes.restore()] == [made[0]["set_id"]] * 2
    nodes.finish()


def test_dumping_in_a_thread_leaves_the_programs_signals_alone(nodes: TwoNodes) -> None:
    """The program around it is in an operation of its own, which a signal must not end at once."""
    code = f"""
import threading
import gpucr
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.undo.interrupts import Interrupts
where = Rendezvous.at("{ADDRESSES[0]}:{RENDEZVOUS_PORT}", node=0, node_count=2, secret={SECRET!r}, meet_s=20)
with Interrupts() as outer:
    outer.commit()
    thread = threading.Thread(target=lambda: gpucr.dump_part({nodes.nodes[0].pid}, "{nodes.store}#set", where))
    thread.start()
    thread.join()
    assert outer.is_committed
"""
    started = [nodes.nodes[0].python(code), nodes.start_dump(1)]
    done = [ended(each) for each in started]
    assert [code for code, _, _ in done] == [0, 0], done
    assert all(node.is_gone() for node in nodes.nodes)
