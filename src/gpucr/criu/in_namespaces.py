"""The process that becomes CRIU in a sandbox (service.py): it enters the namespaces that it was not started in.

A separate process, because only a single-threaded one can enter another mount namespace.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from gpucr.linux import namespaces
from gpucr.linux.trusted_paths import open_file


def identities(command: Sequence[str]) -> str:
    """The identities of a command's absolute paths, in the caller's mount namespace. Raises OSError."""
    found = [os.stat(word) for word in command if word.startswith("/")]
    return " ".join(f"{each.st_dev}:{each.st_ino}" for each in found)


def main(mounts: str, network: str, gpucr: str, programs: str, output_count: str, *rest: str) -> NoReturn:
    """Exec the command in ``rest``, with the number of its socket as an extra argument.

    ``mounts``, ``network`` and ``gpucr`` are the numbers of two namespaces and of a socket to gpucr. CRIU looks up its
    socket's creator, and opens descriptors in that process: so the socket is made here, and its other end goes to
    gpucr, with the numbers of the ``output_count`` files that ``rest`` begins with. They are opened for appending
    inside the mount namespace: what CRIU gives to the job must belong to the job's namespace. ``programs`` are the
    `identities` of the command outside: a program put in CRIU's place inside is not run.
    """
    count = int(output_count)
    paths, command = rest[:count], rest[count:]
    try:
        namespaces.enter(int(network), "net")
        namespaces.enter(int(mounts), "mnt")
        if identities(command) != programs:  # before sending the socket, which tells gpucr that CRIU is starting
            raise OSError(f"{command[0]} is another file in the job's mounts than outside")
        outputs = [open_file(path, os.O_RDWR | os.O_APPEND | os.O_NOCTTY) for path in paths]
        for number in (mounts, network, gpucr):
            os.set_inheritable(int(number), False)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for inherited in (theirs.fileno(), *outputs):
            os.set_inheritable(inherited, True)
        with socket.socket(fileno=int(gpucr)) as to_gpucr:
            socket.send_fds(to_gpucr, [" ".join(["outputs", *map(str, outputs)]).encode()], [ours.fileno()])
        os.execv(command[0], [*command, str(theirs.fileno())])  # noqa: S606 (an argument list, no shell)
    except OSError as e:
        sys.stderr.write(f"{e}\n")
        sys.stderr.flush()
    os._exit(127)
