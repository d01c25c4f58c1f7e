"""A server with a large model in device memory: it answers a seed with what the model makes of it, bit for bit.

It listens on 127.0.0.1, which an isolated job has for itself: with ``--ask SEED`` this program is the client, for
`gpucr exec JOB -- python3 model_server.py --ask SEED`. What it prints then depends on the seed and the weights only.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable

WIDTH = 4096
LAYER_MIB = WIDTH * WIDTH * 4 >> 20
PORT = 7311
ADDRESS = "127.0.0.1"
TIMEOUT_S = 60.0


def load_model(size_mib: int) -> Callable[[int], str]:
    """Make the weights, and return what answers a seed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts: for equal results
    import torch

    torch.use_deterministic_algorithms(True)
    generator = torch.Generator(device="cuda").manual_seed(11)
    layers = [
        torch.randn(WIDTH, WIDTH, device="cuda", generator=generator) / WIDTH**0.5
        for _ in range(max(1, size_mib // LAYER_MIB))
    ]

    def answer(seed: int) -> str:
        values = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to("cuda")
        for layer in layers:
            values = torch.tanh(values @ layer)
        # A sum of integers modulo 2**64 does not depend on the order in which threads add.
        return f"{int(values.view(torch.int32).sum(dtype=torch.int64)):#x} {values[0, 0].item().hex()}"

    return answer


def serve(size_mib: int, port: int) -> None:
    """Answer until the end."""
    answer = load_model(size_mib)
    answer(0)  # cuBLAS loads what it needs at the first call
    with socket.create_server((ADDRESS, port)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer(int(connection.makefile().readline())).encode())


def ask(seed: int, port: int) -> str:
    """The answer of the server in this network namespace."""
    with socket.create_connection((ADDRESS, port), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"{seed}\n".encode())
        return connection.makefile().read()


def main() -> None:
    """Serve, or ask."""
    parser = argparse.ArgumentParser(description="a model server and its client")
    parser.add_argument("--mib", type=int, default=4096, help="size of the model (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="(%(default)s)")
    parser.add_argument("--ask", type=int, metavar="SEED", help="ask the server that runs here")
    options = parser.parse_args()
    if options.ask is not None:
        print(ask(options.ask, options.port))
    else:
        serve(options.mib, options.port)


if __name__ == "__main__":
    main()
