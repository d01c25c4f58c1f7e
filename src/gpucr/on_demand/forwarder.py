"""The forwarder of one job: it listens, forwards bytes, wakes the job when it is asked, and puts it to sleep."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from msgspec.structs import replace

from gpucr import Cancellation
from gpucr.errors import GpucrError, JobDamaged, reason_of
from gpucr.linux import processes
from gpucr.on_demand import policy
from gpucr.on_demand.answering import Answering
from gpucr.on_demand.connection import Connection, NotServed, turn_away
from gpucr.on_demand.folder import WAKE_BUCKETS_S, OnDemandFolder
from gpucr.on_demand.job import Seen, ServedJob, Where
from gpucr.on_demand.listening import Listener
from gpucr.on_demand.neighbours import Message, contender_in
from gpucr.on_demand.policy import Contender, Phase
from gpucr.on_demand.settings import OnDemand
from gpucr.on_demand.tasks import end as end_tasks
from gpucr.on_demand.turn import GaveUp, Turn, Woken, sleep_with_room
from gpucr.records import DEFAULT_PRIORITY, to_json

LOOK_EVERY_S = 1.0
"""How often it looks whether somebody else has changed the job: ended, suspended or resumed it."""
_TICK_S, _DRAIN_LEASE_S, _TRY_PORT_EVERY_S, _RETRY_SLEEP_S = 0.2, 0.5, 0.05, 60.0
_MOST_REFUSED_AT_ONCE = 32
_OUT_OF_RESOURCES_S = 0.1
_T = TypeVar("_T")


class Forwarder:
    """Serves one job until it is told to end. Everything but changes of the job happens in the event loop's thread."""

    def __init__(
        self, folder: OnDemandFolder, settings: OnDemand, listeners: Sequence[Listener], most_connections: int
    ) -> None:
        self.http = settings.http
        self._settings, self._listeners = settings, listeners
        self._most = most_connections
        self._job = ServedJob(folder, settings)
        self._journal = self._job.journal
        self._counts = self._journal.state.counts
        self._phase: Phase = "asleep"
        self._where: Where = "asleep"
        self._priority = DEFAULT_PRIORITY
        self._needs: policy.Bytes | None = self._journal.state.device_bytes or None
        self._may_use: tuple[str, ...] = ()
        self._used_s = self._since_s = time.monotonic()
        self._new_until_s = self._since_s + settings.wake_timeout_s
        self._wanted_s: float | None = None
        self._drain_until_s = self._no_sleep_before_s = 0.0
        self._waiting: dict[asyncio.Future[None], float] = {}
        self._busy: set[Connection] = set()
        self._connections: set[Connection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._cancel = Cancellation()
        self._change = asyncio.Lock()
        self._stirred = asyncio.Event()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="on-demand")

    # --- its life --------------------------------------------------------------------------------------------------

    async def run(self, end: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Serve until ``end`` is set. The job stays as it is then. Raises OSError if nobody could find it."""
        loop = asyncio.get_running_loop()
        answering = Answering(self._answer)
        self._journal.update(process=processes.this_process())
        await self._look()
        tasks = [
            loop.create_task(answering.run()),
            loop.create_task(self._rule()),
            *(loop.create_task(self._accept(each)) for each in self._listeners),
        ]
        self._journal.tell("forwarding", listen=[str(each.address) for each in self._listeners], phase=self._phase)
        on_ready()
        ended = loop.create_task(end.wait())
        try:
            done, _ = await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._cancel.cancel("the forwarder ends")
            await end_tasks((*tasks, ended))
            await end_tasks(self._serving)
            self._threads.shutdown(wait=True)  # what was begun is undone, or done
            self._save()
            self._journal.tell("left", phase=self._phase)
        for each in done - {ended}:
            each.result()

    async def _rule(self) -> None:
        """Decide about the job, whenever something happens and every so often."""
        looked_s = time.monotonic()
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), _TICK_S)
            self._stirred.clear()
            if time.monotonic() - looked_s > LOOK_EVERY_S:
                await self._look()
                looked_s = time.monotonic()
            now_s = time.monotonic()
            self._end_silent(now_s)
            if self._phase == "draining" and now_s > self._drain_until_s:
                self._enter("serving")  # whom it was for has given up
            if self._phase == "serving":
                is_over = now_s - self._used_s >= self._settings.idle_s and now_s >= self._no_sleep_before_s
                if is_over and not self._open_requests(now_s):
                    await self._sleep("idle")
            elif self._phase != "draining" and self._is_wanted():
                await self._wake()
                looked_s = time.monotonic()

    async def _look(self) -> None:
        """Notice what others did to the job."""
        async with self._change:
            try:
                seen = await self._aside(self._job.look)
            except (GpucrError, OSError):
                return  # the next look may show more
            self._take(seen)
            with contextlib.suppress(GpucrError, OSError):
                self._needs = self._job.learn_needs(seen)
                if self._needs is None:
                    self._may_use = await self._aside(self._job.may_use)

    def _take(self, seen: Seen) -> None:
        self._priority, self._where = seen.priority, seen.where
        phases: dict[str, Phase] = {"awake": "serving", "unstarted": "unstarted", "lent": "gone", "gone": "gone"}
        phase: Phase = phases.get(seen.where, "asleep")
        if phase == "serving" and self._phase == "draining":
            return
        if phase != self._phase:
            self._journal.tell("found", where=seen.where, why=seen.why or None)
            if seen.where in ("awake", "asleep"):
                self._job.note(asleep=seen.where == "asleep")
            self._enter(phase)

    # --- requests --------------------------------------------------------------------------------------------------

    async def _accept(self, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener.socket)
            except OSError:  # a client that has left, or a machine without descriptors or memory
                await asyncio.sleep(_OUT_OF_RESOURCES_S)
                continue
            client.setblocking(False)
            self._count(connection_count=self._counts.connection_count + 1)
            self._begin(client, listener.address.job_port)
            await asyncio.sleep(0)  # others too: an accept that need not wait does not let them

    def _begin(self, client: socket.socket, job_port: int) -> None:
        refusal = None
        if len(self._connections) >= self._most:
            refusal = NotServed("full", f"there are {self._most} connections already, as many as the limit allows")
            if len(self._connections) >= self._most + _MOST_REFUSED_AT_ONCE:
                self.refused(refusal)
                turn_away(client, refusal, http=self.http)
                return
        connection = Connection(self, client, job_port)
        self._connections.add(connection)
        task = asyncio.get_running_loop().create_task(self._serve(connection, refusal))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: Connection, refusal: NotServed | None) -> None:
        try:
            await connection.run(refusal)
        finally:
            self._connections.discard(connection)
            self._busy.discard(connection)

    async def admit(self, connection: Connection) -> None:
        if self._serves:
            return
        begun_s = time.monotonic()
        deadline_s = begun_s + self._settings.wake_timeout_s
        self._count(waits=self._counts.waits + 1)
        while not self._serves:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = begun_s
            self._stirred.set()
            try:
                await asyncio.wait_for(waiter, max(deadline_s - time.monotonic(), 0.0))
            except asyncio.TimeoutError:
                raise NotServed(
                    "timeout", f"the job {self._job.name} could not be woken in {self._settings.wake_timeout_s:g} s"
                ) from None
            finally:
                self._waiting.pop(waiter, None)
        self._count(wait_s=self._counts.wait_s + time.monotonic() - begun_s)

    @property
    def _serves(self) -> bool:
        return self._phase == "serving"

    async def to_job(self, job_port: int) -> socket.socket:
        """See `Served`. A job that has just been started or restored gets time to listen."""
        loop = asyncio.get_running_loop()
        while True:
            for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
                try:
                    made = self._job.socket(family)
                except (GpucrError, OSError) as e:
                    raise NotServed("no-listener", f"the job {self._job.name} cannot be reached: {reason_of(e)}") from e
                try:
                    await loop.sock_connect(made, (host, job_port))
                    return made
                except OSError:
                    made.close()
                except BaseException:
                    made.close()
                    raise
            if time.monotonic() > self._new_until_s or self._phase == "gone":
                raise NotServed("no-listener", f"the job {self._job.name} does not listen on port {job_port}")
            await asyncio.sleep(_TRY_PORT_EVERY_S)
            with contextlib.suppress(GpucrError):
                await self._aside(self._job.look)  # it may have been restored, with another network

    def passed(self, connection: Connection, *, from_client: int = 0, to_client: int = 0) -> None:
        self._used_s = time.monotonic()
        self._busy.add(connection)
        self._in_bytes += from_client
        self._out_bytes += to_client

    _in_bytes = _out_bytes = 0

    def refused(self, reason: NotServed) -> None:
        before = self._counts.refused
        self._count(refused={**before, reason.kind: before.get(reason.kind, 0) + 1})
        if before.get(reason.kind, 0) == 0 or reason.kind != "full":  # thousands may come at once
            self._journal.tell("refused", kind=reason.kind, why=reason.why)

    def _open_requests(self, now_s: float) -> int:
        self._busy = {each for each in self._busy if each.is_open(now_s)}
        return len(self._busy)

    def _end_silent(self, now_s: float) -> None:
        """A client that sends a byte a minute, or never reads, must not keep a job on its GPU forever."""
        for each in tuple(self._busy):
            if each.is_over(now_s, self._settings.request_limit_s):
                limit = f"{self._settings.request_limit_s:g} s"
                self.refused(NotServed("request-limit", f"no byte of an answer came in {limit}"))
                self._busy.discard(each)
                each.shut()

    def _is_wanted(self) -> bool:
        """Whether a request waits, or was interrupted for a job of a higher priority."""
        return bool(self._waiting) or (self._phase != "unstarted" and self._open_requests(time.monotonic()) > 0)

    # --- changes of the job ----------------------------------------------------------------------------------------

    async def _wake(self) -> None:
        async with self._change:
            before = self._phase
            self._enter("waiting")
            turn = Turn(
                self._job, self._as_contender, self._check, self._cancel,
                lambda names: self._journal.tell("waits", waits_for=list(names)),
                self._enter_from_thread,
            )  # fmt: skip
            try:
                woken = await self._aside(turn.take)
                await self._until_it_listens(woken)
            except GaveUp:
                self._enter(before)
                return
            except JobDamaged as e:
                self._failed("gone", "damaged", e)
                return
            except Exception as e:  # noqa: BLE001 - the clients get an answer; the port stays
                self._failed(before, "failed", e)
                return
            self._enter("serving")
            if woken.found != "awake":
                self._counted_wake(woken)
            self._journal.tell(
                "woken", found=woken.found, seconds=round(woken.seconds, 3), evicted=list(woken.evicted) or None,
                moved_to=list(woken.moved) or None,
            )  # fmt: skip
        await self._look()

    async def _until_it_listens(self, woken: Woken) -> None:
        """A job that was started has no memory on the GPU at first: until it listens, nobody else may count on that."""
        if woken.found in ("unstarted", "stored"):
            self._new_until_s = time.monotonic() + self._settings.wake_timeout_s
        if woken.found == "unstarted":
            (await self.to_job(self._listeners[0].address.job_port)).close()

    def _failed(self, phase: Phase, result: str, e: Exception) -> None:
        why = reason_of(e) or type(e).__name__
        self._counted("wakes", result)
        self._journal.tell("wake-failed", why=why, code=getattr(e, "code", None))
        self._enter(phase)
        for waiter in tuple(self._waiting):
            if not waiter.done():
                waiter.set_exception(NotServed("wake-failed", why))
        for each in tuple(self._busy):
            each.shut()  # an interrupted request of a job that does not come back
        self._busy.clear()

    async def _sleep(self, reason: str) -> bool:
        """Returns whether it sleeps."""
        async with self._change:
            if self._phase not in ("serving", "draining"):
                return self._phase in ("asleep", "unstarted", "gone")
            self._enter("falling-asleep")
            begun_s = time.monotonic()
            try:
                await self._aside(lambda: sleep_with_room(self._job, self._cancel))
            except Exception as e:  # noqa: BLE001 - it stays awake, and is told
                self._journal.tell("sleep-failed", reason=reason, why=reason_of(e), code=getattr(e, "code", None))
                self._counted("sleeps", "failed")
                self._no_sleep_before_s = time.monotonic() + _RETRY_SLEEP_S
                self._enter("gone" if isinstance(e, JobDamaged) else "serving")
                return False
            self._enter("asleep")
            self._counted("sleeps", reason)
            seconds = round(time.monotonic() - begun_s, 3)
            self._journal.tell("asleep", reason=reason, seconds=seconds)
            self._where = "asleep"
            self._stirred.set()
            return True

    async def _store(self) -> bool:
        """Move the sleeping job to its store. Returns whether it is there."""
        async with self._change:
            if not self._as_contender().is_movable:
                return False
            begun_s = time.monotonic()
            try:
                await self._aside(lambda: self._job.store(self._cancel))
            except Exception as e:  # noqa: BLE001 - it sleeps as before, and is told
                self._journal.tell("store-failed", why=reason_of(e), code=getattr(e, "code", None))
                return False
            self._where = "stored"
            self._counted("sleeps", "stored")
            self._journal.tell("stored", seconds=round(time.monotonic() - begun_s, 3))
            return True

    def _enter(self, phase: Phase) -> None:
        now_s = time.monotonic()
        if phase == "serving" and self._phase != "draining":
            self._since_s = self._used_s = now_s
        if phase == "serving":
            self._wanted_s = None
            for waiter in tuple(self._waiting):
                if not waiter.done():
                    waiter.set_result(None)
        elif phase == "waiting" and self._wanted_s is None:
            self._wanted_s = min(self._waiting.values(), default=now_s)
        elif phase not in ("waiting", "waking", "draining", "falling-asleep"):
            self._wanted_s = None
        self._phase = phase

    def _enter_from_thread(self, phase: Phase, needs: policy.Bytes | None) -> None:
        """``needs``: what it will have, on the GPUs where it wakes."""
        self._phase, self._needs = phase, needs

    def _check(self) -> None:
        """Raise GaveUp if nobody asks any more. Called in the thread that waits."""
        is_open = any(each.is_open(time.monotonic()) for each in tuple(self._busy))
        if self._cancel.is_cancelled or not (self._waiting or is_open):
            raise GaveUp

    # --- others ----------------------------------------------------------------------------------------------------

    def _as_contender(self) -> Contender:
        now_s = time.monotonic()
        return Contender(
            self._job.name,
            os.geteuid(),
            self._phase,
            self._priority,
            self._needs,
            self._settings.stay_s,
            self._may_use,
            sum(each.is_open(now_s) for each in tuple(self._busy)),
            self._used_s,
            self._since_s,
            self._wanted_s,
            self._phase == "asleep" and self._where == "asleep" and self._settings.sleep_to is not None,
        )

    async def _answer(self, message: Message, uid: int) -> Message:
        """Answer another forwarder, or `gpucr jobs`."""
        what = message.get("ask")
        if what == "look":
            return {"job": to_json(self._as_contender())}
        if what == "status" and uid in (os.geteuid(), 0):
            return self._status()
        if what == "store" and uid == os.geteuid():
            return {"answer": "done" if await self._store() else "no"}
        if what in ("sleep", "drain"):
            wanted_by = contender_in(message, "for", uid)
            answer = policy.makes_room(self._as_contender(), wanted_by, time.monotonic())
            if what == "sleep" and answer == "now":
                is_asleep = await self._sleep("evicted")
                return {"answer": "done" if is_asleep else "failed"}
            if what == "drain" and answer in ("now", "drain"):
                self._drain_until_s = time.monotonic() + _DRAIN_LEASE_S
                if self._phase == "serving":
                    self._enter("draining")
                return {"answer": "done"}
            return {"answer": "no"}
        raise ValueError(f"nobody asks {what!r}")

    def _status(self) -> Message:
        now_s = time.monotonic()
        self._add_bytes()
        return {
            "job": to_json(self._as_contender()),
            "waiting": len(self._waiting),
            "open_connections": len(self._connections),
            "idle_s": round(now_s - self._used_s, 3),
            "listen": [str(each.address) for each in self._listeners],
            "counts": to_json(self._counts),
        }

    # --- what is counted -------------------------------------------------------------------------------------------

    def _count(self, **changes: Any) -> None:
        self._counts = replace(self._counts, **changes)

    def _counted(self, counter: str, what: str) -> None:
        before = getattr(self._counts, counter)
        self._count(**{counter: {**before, what: before.get(what, 0) + 1}})
        self._save()

    def _counted_wake(self, woken: Woken) -> None:
        buckets = tuple(
            count + (woken.seconds <= bound)
            for count, bound in zip(self._counts.wake_buckets, WAKE_BUCKETS_S, strict=False)
        )
        self._count(wake_buckets=buckets, wake_s=self._counts.wake_s + woken.seconds)
        self._counted("wakes", woken.found)

    def _add_bytes(self) -> None:
        """Here and not for each piece: a new record would cost more than the piece."""
        before = self._counts.moved_bytes
        in_bytes, out_bytes = before.get("in", 0) + self._in_bytes, before.get("out", 0) + self._out_bytes
        self._in_bytes = self._out_bytes = 0
        self._count(moved_bytes={"in": in_bytes, "out": out_bytes})

    def _save(self) -> None:
        self._add_bytes()
        self._journal.update(counts=self._counts)

    async def _aside(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
