"""Several jobs, and one GPU that two of them fit on."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gpucr
from gpucr.borrow import ledger
from gpucr.errors import GpuFull, Unsupported
from gpucr.linux import processes
from gpucr.on_demand.job import Seen
from gpucr.on_demand.policy import Contender, Place
from gpucr.on_demand.turn import Turn
from gpucr.supervise.folder import SupervisedFolder
from gpucr.supervise.job import RegisteredJob
from gpucr.supervise.settings import Supervision
from tests import command
from tests.counter import DEADLINE_S, wait_until
from tests.on_demand.models import Model, Models
from tests.storm import long

pytestmark = [pytest.mark.root, pytest.mark.in_turn]


def test_the_least_recently_used_idle_one_makes_room(models: Models) -> None:
    third = models.asleep("third")
    first, second = models.start("first"), models.start("second")
    assert [each.ask() for each in (first, second)] == ["first 101", "second 101"]
    assert third.ask() == "third 101"
    assert [each.phase for each in (first, second, third)] == ["asleep", "serving", "serving"]
    assert first.ask() == "first 102"
    assert [each.phase for each in (first, second, third)] == ["serving", "asleep", "serving"]
    (evicted,) = second.events("asleep")
    assert evicted["reason"] == "evicted"
    assert first.events("woken")[-1]["evicted"] == [f"second ({second.served.forwarder.pid})"]  # type: ignore[union-attr]


def test_an_open_request_is_never_interrupted_for_the_same_priority(models: Models) -> None:
    waits = models.asleep("waits", mib=150)
    busy = models.start("busy", mib=150)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(busy.ask, "/slow?1.5")
        wait_until(lambda: busy.served.open_requests == 1, "the request")
        quick = threads.submit(waits.ask)
        wait_until(lambda: busy.phase == "draining", "the slice to be over")
        assert slow.result(DEADLINE_S) == "busy 101"
        assert quick.result(DEADLINE_S) == "waits 101"
    assert (busy.phase, waits.phase) == ("asleep", "serving")


def test_new_requests_are_held_back_while_others_wait(models: Models) -> None:
    waits = models.asleep("waits", mib=150)
    busy = models.start("busy", mib=150)
    with ThreadPoolExecutor(3) as threads:
        slow = threads.submit(busy.ask, "/slow?1.5")
        wait_until(lambda: busy.served.open_requests == 1, "the request")
        quick = threads.submit(waits.ask)
        wait_until(lambda: busy.phase == "draining", "the slice to be over")
        held = threads.submit(busy.ask)
        assert quick.result(DEADLINE_S) == "waits 101"
        assert slow.done()
        assert held.result(DEADLINE_S) == "busy 103"
    assert busy.served.counts.wakes == {"asleep": 1}


def test_a_higher_priority_interrupts_and_the_request_is_answered_later(models: Models) -> None:
    high = models.asleep("high", mib=150, priority=200)
    low = models.start("low", mib=150, stay_s=0.1)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(low.ask, "/slow?1.0")
        wait_until(lambda: low.served.open_requests == 1, "the request")
        assert high.ask() == "high 101"
        assert slow.result(DEADLINE_S) == "low 101"
    assert low.served.counts.sleeps == {"evicted": 1}


def test_two_that_are_asked_all_the_time_alternate(models: Models) -> None:
    both = [models.asleep(name, mib=150, stay_s=0.3) for name in ("a", "b")]
    is_over = threading.Event()
    answers: dict[str, list[int]] = {each.name: [] for each in both}

    def ask(model: Model) -> None:
        while not is_over.is_set():
            answers[model.name].append(int(model.ask().split()[1]))

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, each) for each in both for _ in range(2)]
        try:
            wait_until(lambda: all(each.served.counts.wakes.get("asleep", 0) >= 3 for each in both), "slices")
        finally:
            is_over.set()
        for each in asking:
            each.result(DEADLINE_S)
    for model in both:
        assert sorted(answers[model.name]) == list(range(101, 101 + len(answers[model.name])))
        wakes = model.served.counts.wakes["asleep"]
        assert len(answers[model.name]) >= 2 * wakes, "it was put to sleep after every request"


def test_a_request_that_waits_for_too_long_gets_an_answer(models: Models) -> None:
    waits = models.asleep("waits", mib=150, wake_timeout_s=0.5)
    busy = models.start("busy", mib=150)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(busy.ask, "/slow?2")
        wait_until(lambda: busy.served.open_requests == 1, "the request")
        status, text = waits.response()
        assert (status, text) == (503, "the job waits could not be woken in 0.5 s")
        assert slow.result(DEADLINE_S) == "busy 101"
    assert waits.served.counts.refused == {"timeout": 1}
    wait_until(lambda: busy.phase == "serving", "the drain to end")
    assert busy.ask() == "busy 103"


def test_jobs_on_several_gpus(models: Models) -> None:
    both = models.asleep("both", mib=150, devices="0,1")
    first, second = models.start("first", mib=150), models.start("second", mib=150, devices="1")
    assert both.ask() == "both 101"
    assert [each.phase for each in (first, second)] == ["asleep", "asleep"]
    assert second.ask() == "second 101"
    assert [each.phase for each in (first, both)] == ["asleep", "asleep"]
    assert first.ask() == "first 101"
    assert second.phase == "serving"


@pytest.mark.parametrize("wake_on", ["auto", "1"])
def test_it_wakes_on_another_gpu_that_has_room(models: Models, wake_on: str) -> None:
    second = models.asleep("second", devices="1")
    model = models.run("llama", mib=150)
    words = ("--listen", model.listen, "--http", "--wake-on", wake_on)
    assert command.run("on-demand", "llama", *words).returncode == 0
    gpucr.suspend("llama")
    model.wait("asleep")
    first = models.start("first", mib=150)
    assert model.ask() == "llama 101"
    assert model.events("woken")[-1]["moved_to"] == [models.gpus[1]]
    wait_until(lambda: list(model.served.device_bytes) == [models.gpus[1]], "its needs to be where it is")
    assert [each.ask() for each in (second, first)] == ["second 101", "first 101"]
    assert [each.phase for each in (model, first)] == ["asleep", "serving"]
    assert model.ask() == "llama 102"
    assert sorted(each.phase for each in (first, second)) == ["asleep", "serving"], "one makes room, on either GPU"


def test_gpus_that_are_not_here(models: Models) -> None:
    model = models.run("llama")
    for words in (("--wake-on", "7"), ("--wake-on", "auto,1"), ("--wake-on", "")):
        done = command.run("on-demand", "llama", "--listen", model.listen, *words, "--dry-run")
        assert (done.returncode, "GPUCR-BAD-GPU" in done.stderr) == (2, True), done.stderr


class Refusing:
    """A job whose first wake is refused."""

    name = "llama"

    def __init__(self, reason: Exception, allowed: Sequence[str] = ()) -> None:
        self.reason, self.allowed = reason, tuple(allowed)
        self.places: list[Place] = []
        self.told: list[str] = []
        self.journal = self

    def look(self) -> Seen:
        """It sleeps."""
        return Seen("asleep")

    def wake_on(self) -> tuple[str, ...]:
        """These."""
        return self.allowed

    def tell(self, event: str, **_: object) -> None:
        """Its journal."""
        self.told.append(event)

    def wake(self, seen: Seen, place: Place, cancel: gpucr.Cancellation) -> None:
        """Refused once."""
        self.places.append(place)
        if len(self.places) == 1:
            raise self.reason

    def take(self, needs: dict[str, int]) -> list[str]:
        """Its turn. Returns its phases."""
        me = Contender("llama", 0, "waiting", 100, needs, 1.0, waits_since_s=1.0)
        phases: list[str] = []
        turn = Turn(
            self, lambda: me, lambda: None, gpucr.Cancellation(), lambda _: None,  # type: ignore[arg-type]
            lambda phase, _: phases.append(phase),
        )  # fmt: skip
        assert turn.take().found == "asleep"
        return phases


def test_a_job_that_finds_the_gpu_full_does_not_keep_others_waiting(gpus: list[str]) -> None:
    job = Refusing(GpuFull("the GPU is full"))
    assert job.take({gpus[0]: 1 << 20}) == ["waking", "waiting", "waking"]


def test_a_job_that_the_driver_does_not_move_wakes_on_its_own_gpu(models: Models) -> None:
    first = models.start("first", mib=150)
    job = Refusing(Unsupported("this driver has no GPU maps", hint="-", code="GPUCR-DRIVER"), models.gpus)
    job.take({models.gpus[0]: 100 << 20})
    assert job.places == [{models.gpus[0]: models.gpus[1]}, {models.gpus[0]: models.gpus[0]}]
    assert (job.told, first.phase) == (["move-failed"], "asleep")


def test_a_job_starts_when_it_is_asked(models: Models) -> None:
    busy = models.start("busy", mib=150)
    later = models.later("later", "--idle", "300s", mib=150)
    assert (later.phase, later.state) == ("unstarted", "unknown")
    assert later.ask() == "later 101"
    assert busy.phase == "asleep"
    assert later.state == "running"
    assert busy.ask() == "busy 101"
    assert later.phase == "asleep"
    gpucr.stop_job("later", grace_s=0.0)
    wait_until(lambda: later.phase == "unstarted", "its end to be noticed")
    assert later.ask() == "later 101"


def test_a_borrower_comes_first(models: Models, tmp_path: Path) -> None:
    model = models.start("llama", wake_timeout_s=DEADLINE_S)
    script = 'touch "$0-runs"; while [ ! -e "$0" ]; do sleep 0.01; done'
    borrower = command.start(
        "borrow", "--gpu", "0", "--priority", 500, "--no-isolate", "--", "sh", "-c", script, str(tmp_path / "eval")
    )
    try:
        wait_until((tmp_path / "eval-runs").exists, "the borrower")
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(model.ask)
            wait_until(lambda: model.served.waiting == 1 or model.served.open_requests == 1, "the request")
            wait_until(lambda: bool(model.events("waits")), "it to wait for the borrower")
            assert model.state == "suspended"
            (tmp_path / "eval").touch()
            assert asked.result(DEADLINE_S) == "llama 101"
    finally:
        (tmp_path / "eval").touch()
        assert borrower.wait(DEADLINE_S) == 0
        borrower.communicate()
    assert not ledger.borrowings()


def test_a_job_of_others_is_never_touched(models: Models) -> None:
    """Without a forwarder nobody puts it to sleep; who needs its memory waits, and wakes when it is gone."""
    waits = models.asleep("waits", mib=150)
    stranger = models.run("stranger", mib=150)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(waits.ask)
        wait_until(lambda: bool(waits.events("waits")), "it to wait")
        assert stranger.ask(direct=True) == "stranger 101"
        gpucr.stop_job("stranger", grace_s=0.0)
        assert asked.result(DEADLINE_S) == "waits 101"


SHORT_OF_MEMORY = """
import sys
from gpucr.linux import memory
from gpucr.on_demand import run
from gpucr.on_demand.listing import look
memory.machine_available_bytes = lambda: 1 << (40 if look("first").counts.sleeps.get("stored") else 20)
run.forward(sys.argv[1])
"""


@long
@pytest.mark.criu
def test_where_host_memory_is_short_the_least_recently_used_one_goes_to_its_store(
    models: Models, tmp_path: Path
) -> None:
    options = ("--http", "--idle", "300s", "--sleep-to", tmp_path / "store")
    first, second = (models.run(name, mib=20, isolate=True) for name in ("first", "second"))
    for model in (first, second):
        done = command.run("on-demand", model.name, "--listen", model.listen, *options)
        assert done.returncode == 0, done.stderr
        gpucr.suspend(model.name)
        model.wait("asleep")
    third = models.start("third", idle_s=0.3)
    gpucr.end_forwarders(["third"])
    short = subprocess.Popen([sys.executable, "-c", SHORT_OF_MEMORY, "third"])
    try:
        third.wait("asleep")
        assert [job.state.word for job in gpucr.list_jobs()] == ["dumped", "suspended", "suspended"]
        assert first.ask() == "first 101"
        assert first.phase == "serving"
        (woken,) = first.events("woken")
        assert woken["found"] == "stored"
        assert command.run("ls", tmp_path / "store").stdout.count("first") == 0
    finally:
        short.terminate()
        assert short.wait(DEADLINE_S) == 0


def test_without_a_store_a_job_that_host_memory_cannot_hold_stays_awake(models: Models) -> None:
    models.asleep("first")
    second = models.start("second", idle_s=0.3)
    gpucr.end_forwarders(["second"])
    short = subprocess.Popen([sys.executable, "-c", SHORT_OF_MEMORY, "second"])
    try:
        wait_until(lambda: bool(second.events("sleep-failed")), "the sleep to fail")
        assert second.events("sleep-failed")[0]["code"] == "GPUCR-HOST-MEMORY"
        assert (second.ask(), second.phase) == ("second 101", "serving")
    finally:
        short.terminate()
        assert short.wait(DEADLINE_S) == 0


@long
@pytest.mark.criu
def test_a_job_that_dies_is_restored_by_its_supervisor_while_its_clients_wait(models: Models, tmp_path: Path) -> None:
    model = Model("llama")
    done = command.run(
        "run", "--name", "llama", "--every", "1s", "--to", tmp_path / "store", "--cwd", tmp_path,
        "--on-demand", model.listen, "--http", "--", *model.command(20, "0"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    try:
        wait_until(lambda: model.response()[0] == 200, "the server")
        taken = model.served.counts.connection_count
        wait_until(lambda: bool(SupervisedFolder("llama").state().checkpoints.get("success")), "a checkpoint")
        processes.send_signal(model.record.root, signal.SIGKILL)
        wait_until(lambda: model.phase == "gone", "its end to be noticed")
        assert model.ask().startswith("llama ")
        assert model.served.counts.connection_count == taken + 1
        assert SupervisedFolder("llama").state().restores["success"] == 1
    finally:
        gpucr.end_supervisors(["llama"], "leave", timeout_s=DEADLINE_S)


def test_a_supervisor_waits_for_a_job_that_sleeps(models: Models) -> None:
    model = models.start("llama", idle_s=0.3)
    model.wait("asleep")
    watched = RegisteredJob("llama", Supervision("/store"), None)
    assert watched.look().word == "lent"
    assert model.ask() == "llama 101"
    assert watched.look().word == "running"
