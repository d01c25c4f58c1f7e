"""Metrics over HTTP, to anybody who can connect: few connections at a time, each for a short time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from gpucr.errors import InvalidRequest, reason_of
from gpucr.linux.visitors import Visitors
from gpucr.supervise import metrics

_MOST_CONNECTIONS, _MOST_OF_ONE, _LIMIT_S = 16, 8, 10.0


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._visitors = Visitors(_MOST_CONNECTIONS, _MOST_OF_ONE, _LIMIT_S)
        super().__init__(*arguments)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more."""
        return self._visitors.admit(request, str(client_address[0]))

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve it, within the limit."""
        with contextlib.suppress(TimeoutError), self._visitors.served(request):
            super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left, or was made to, is no error."""


class _Handler(WSGIRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        """Nothing is logged."""


def serve(host: str, port: int, more: Sequence[metrics.Collector] = ()) -> int:
    """Serve http://HOST:PORT/metrics in a thread. Port 0: any free one. Returns the port. Raises InvalidRequest."""
    application = metrics.application(more)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind: type[_Server] = type("Server", (_Server,), {"address_family": family})
        server: _Server = make_server(str(address[0]), port, application, kind, _Handler)
    except (OSError, OverflowError) as e:
        raise InvalidRequest(
            f"{host}:{port} cannot be listened on: {reason_of(e)}", hint="name another address or port"
        ) from e
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)
