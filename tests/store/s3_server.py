"""An S3-compatible server in a process of its own, and a TCP proxy in front of it that cuts connections.

Run as a program it is the server: localbucket, which keeps objects in files and creates them with link(2), and so keeps
the promise of a conditional write. What it lacks is added here: it would store what arrived of a request that was cut,
and an upload that is ended while a part of it still arrives would leave that part behind.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import importlib
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tests.ports import lasting_port

BUCKET = "snapshots"
_DEADLINE_S = 30.0
_UPLOAD = re.compile(r"[?&]uploadId=([^&]*)")


@dataclass(frozen=True)
class Server:
    """Where the server listens, and the folder in which it keeps its buckets."""

    port: int
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Where it is, as users say it. A network of its own needs a `CuttingProxy` at the same port."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }

    def unfinished_uploads(self) -> list[Path]:
        """What is left of uploads in parts that were neither completed nor aborted."""
        return list((self.folder / ".localbucket-uploads").glob("*"))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server with one empty bucket, stopped at the end."""
    port = lasting_port()
    command = [sys.executable, "-m", "tests.store.s3_server", str(port), str(folder)]
    root, quiet = Path(__file__).parents[2], subprocess.DEVNULL
    with subprocess.Popen(command, cwd=root, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_until(lambda: _answers(port), process)
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("PUT", f"/{BUCKET}")
            assert connection.getresponse().status == 200
            connection.close()
            yield Server(port, folder)
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _wait_until(reached: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + _DEADLINE_S
    while not reached():
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < give_up_s, "the server does not answer"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)


class _WholeRequests:
    """What a client sends, if an end that comes too early is an error."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, length: int) -> bytes:
        data = self._stream.read(length)
        if len(data) < length:
            raise ConnectionAbortedError("the request was cut")
        return data

    def readline(self, limit: int = -1) -> bytes:
        return self._stream.readline(limit)

    def close(self) -> None:
        self._stream.close()


class _Arriving:
    """The parts of uploads that are being received."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def part_of(self, upload: str) -> Iterator[None]:
        with self._changed:
            self._counts[upload] += 1
        try:
            yield
        finally:
            with self._changed:
                self._counts[upload] -= 1
                self._changed.notify_all()

    def wait_for_parts_of(self, upload: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._counts[upload] == 0, _DEADLINE_S)


def _serve(port: int, folder: str) -> None:
    localbucket = importlib.import_module("localbucket")
    arriving = _Arriving()

    class Handler(localbucket.S3Handler):  # type: ignore[name-defined,misc]
        data_root = Path(folder)
        disable_nagle_algorithm = True  # each answer, its headers and then its body, took 40 ms

        rfile: Any

        def setup(self) -> None:
            super().setup()
            self.rfile = _WholeRequests(self.rfile)

        def _dispatch(self, handle: Callable[[], None]) -> None:
            upload = _UPLOAD.search(self.path)
            if upload is None:
                super()._dispatch(handle)
            elif self.command == "PUT":
                with arriving.part_of(upload.group(1)):
                    super()._dispatch(handle)
            else:
                arriving.wait_for_parts_of(upload.group(1))
                super()._dispatch(handle)

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


class CuttingProxy:
    """Passes connections on, and cuts those that ``cut_after`` selects.

    ``cut_after(number, request)`` is asked once for each connection, with its first bytes: after how many bytes to the
    client, or, as a negative number, from the client, it is cut; None: never. ``cuts`` counts what was cut.
    ``listener``: where it takes connections, which may be in another network. ``each_request``: it is also asked for
    later requests of a connection, whose bytes are counted again.
    """

    def __init__(
        self,
        target_port: int,
        cut_after: Callable[[int, bytes], int | None],
        listener: socket.socket | None = None,
        *,
        each_request: bool = False,
    ) -> None:
        self._each_request = each_request
        self._target_port = target_port
        self._cut_after = cut_after
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        self.cuts = 0
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> CuttingProxy:
        self._accepting.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(_DEADLINE_S)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(client, self.connections), daemon=True)
            thread.start()

    def _serve(self, client: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._target_port)) as server:
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            moved = {client: 0, server: 0}
            limit: int | None = None
            while True:
                for source in select.select([client, server], [], [], _DEADLINE_S)[0]:
                    data = source.recv(16384)
                    if source is client and (moved[client] == 0 or (self._each_request and limit is None)):
                        limit = self._cut_after(number, data)
                        moved = {client: 0, server: 0}
                    if not data:
                        return
                    moved[source] += len(data)
                    from_client = limit is not None and limit < 0 and moved[client] >= -limit
                    to_client = limit is not None and limit >= 0 and source is server and moved[server] > limit
                    if from_client or to_client:
                        self.cuts += 1
                        return
                    (server if source is client else client).sendall(data)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
