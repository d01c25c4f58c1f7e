"""The process that becomes CRIU in a sandbox (service.py): it enters the namespaces that it was not started in.

A separate process, because only a single-threaded one can enter another mount namespace.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from gpucr.linux import credentials, namespaces
from gpucr.linux.trusted_paths import open_file


def identities(command: Sequence[str]) -> str:
    """The identities of a command's absolute paths, in the caller's mount namespace. Raises OSError."""
    found = [os.stat(word) for word in command if word.startswith("/")]
    return " ".join(f"{each.st_dev}:{each.st_ino}" for each in found)


def main(entered: str, gpucr: str, keeps: str, programs: str, output_count: str, *rest: str) -> NoReturn:
    """Become the command in ``rest``, which gets the number of its socket as one more argument.

    ``entered`` has the numbers of namespaces (``net=5,mnt=6``: the mounts come last), ``gpucr`` is that of a socket to
    gpucr. CRIU looks up who made its socket, and opens descriptors in that process: so the socket is made here, and its
    other end goes to gpucr, with the numbers of the ``output_count`` files that ``rest`` begins with. They are opened
    to append, in the mount namespace: what CRIU gives to the job must be of the job's namespace. ``programs`` are the
    `identities` of the command outside: nothing that has been put in CRIU's place inside is run. ``keeps``: all
    capabilities that are left then, as a number, and nothing gives it or the job new ones; empty: as they are.
    """
    count = int(output_count)
    paths, command = rest[:count], rest[count:]
    try:
        numbers = {kind: int(number) for kind, _, number in (each.partition("=") for each in entered.split(","))}
        for kind in [kind for kind in namespaces.KINDS if kind in numbers]:
            namespaces.enter(numbers[kind], kind)
        if identities(command) != programs:  # before the socket, which gpucr takes for a sign that CRIU starts
            raise OSError(f"{command[0]} is another file in the job's mounts than outside")
        outputs = [open_file(path, os.O_RDWR | os.O_APPEND | os.O_NOCTTY) for path in paths]
        for number in (*numbers.values(), int(gpucr)):
            os.set_inheritable(number, False)
        if keeps:
            credentials.reduce_to(int(keeps))
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
