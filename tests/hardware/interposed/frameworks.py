"""Single-process jobs of the frameworks that people use, a line a step: python3 frameworks.py JOB STEPS PAUSE_S.

Every value is a function of the seed alone. The jobs are the functions from `compiled` on; each returns its step.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # a job's log has what it says on stderr, too
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")  # read when JAX starts
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".06")  # in one call, as its default of .75 is

HOOKS_FILE = "GPUCR_TEST_HOOKS"
"""The variable that names the file in which the hooks of `hooks` note that they were called."""
WIDTH = 512
PROFILED_STEPS = 10
Step = Callable[[int], object]


def _seeded() -> Any:
    import torch

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    return torch


def _training(compile_it: bool) -> Step:
    torch = _seeded()
    layers = [torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)]
    model = torch.nn.Sequential(*layers).cuda()
    called = torch.compile(model, mode="reduce-overhead") if compile_it else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(_: int) -> object:
        inputs = torch.randn(128, WIDTH, device="cuda")
        loss = torch.nn.functional.mse_loss(called(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item().hex()

    return step


def compiled() -> Step:
    """A training through torch.compile, whose forward and backward passes are CUDA graphs."""
    return _training(compile_it=True)


def transformer() -> Step:
    """A GPT-2 of random weights from transformers: a training step, and eight tokens generated from the result."""
    torch = _seeded()
    import transformers  # the libraries are not where types are checked

    shape = transformers.GPT2Config(
        vocab_size=1024, n_positions=64, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(shape).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = torch.zeros(1, 1, dtype=torch.long, device="cuda")

    def step(_: int) -> object:
        tokens = torch.randint(0, 1024, (8, 64), device="cuda")
        model.train()
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        said = model.generate(
            start, attention_mask=torch.ones_like(start), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        return f"{loss.item().hex()} {said[0].tolist()}"

    return step


def jax() -> Step:
    """A compiled step with a matrix product and a key for random numbers; the memory is taken in one call."""
    import jax as library
    import jax.numpy as numbers

    @library.jit  # type: ignore[untyped-decorator]
    def advance(x: Any, weights: Any, key: Any) -> Any:
        key, noise = library.random.split(key)
        x = numbers.tanh(x @ weights) + 0.01 * library.random.normal(noise, x.shape)
        return x, key, library.lax.bitcast_convert_type(x, numbers.uint32).sum(dtype=numbers.uint32)

    if library.default_backend() != "gpu":
        sys.exit("JAX sees no GPU")
    key, first, second = library.random.split(library.random.key(7), 3)
    weights = library.random.normal(first, (WIDTH, WIDTH)) * (1.5 / WIDTH**0.5)
    state = [library.random.normal(second, (WIDTH, WIDTH)), key]

    def step(_: int) -> object:
        state[0], state[1], checksum = advance(state[0], weights, state[1])
        return f"{int(checksum)} {float(state[0][0, 0]).hex()}"

    return step


def _recurrence(cupy: Any) -> Step:
    cupy.random.seed(5)
    state = [cupy.random.random(1 << 20)]

    def step(_: int) -> object:
        x = 3.9 * state[0] * (1.0 - state[0])
        x += 1e-6 * cupy.random.random(x.size)
        state[0] = x % 1.0
        return int(state[0].view(cupy.uint64).sum(dtype=cupy.uint64))

    return step


def cupy() -> Step:
    """A chaotic recurrence, in CuPy's own pool."""
    import cupy as library

    return _recurrence(library)


def cupy_async() -> Step:
    """The same in the driver's pool (cudaMallocAsync), which stays with the driver."""
    import cupy as library

    library.cuda.set_allocator(library.cuda.MemoryAsyncPool().malloc)
    return _recurrence(library)


def numba() -> Step:
    """A kernel that numba compiled."""
    import numpy

    vars(numpy).setdefault("row_stack", numpy.vstack)  # numba-cuda asks for what NumPy 2.5 has dropped
    from numba import cuda  # type: ignore[import-not-found]

    @cuda.jit  # type: ignore[untyped-decorator]  # numba is not installed where types are checked
    def advance(values: Any, number: int) -> None:
        i = cuda.grid(1)
        if i < values.size:
            values[i] = values[i] * 6364136223846793005 + 1442695040888963407 + number  # modulo 2**64

    values = cuda.to_device(numpy.arange(1 << 22, dtype=numpy.int64))

    def step(number: int) -> object:
        advance[values.size // 256, 256](values, number)
        return int(values.copy_to_host()[::97].sum(dtype=numpy.int64))

    return step


def server() -> Step:
    """An inference server over HTTP with a thread for each request; a step asks it."""
    torch = _seeded()
    layers = [torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5 for _ in range(64)]

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            values = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(int(self.path[1:]))).to("cuda")
            for layer in layers:
                values = torch.tanh(values @ layer)
            answer = str(int(values.view(torch.int32).sum(dtype=torch.int64))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=listening.serve_forever, daemon=True).start()

    def step(number: int) -> object:
        with urllib.request.urlopen(f"http://127.0.0.1:{listening.server_port}/{number}") as answer:
            return answer.read().decode()

    return step


def hooks() -> Step:
    """A training that empties torch's cache before each freeze, and notes when each of its hooks was called."""
    import gpucr

    torch = _seeded()
    step = _training(compile_it=False)
    file = os.environ.get(HOOKS_FILE)

    def note(word: str) -> None:
        if file is not None:
            with open(file, "a") as notes:
                notes.write(f"{word}\n")

    @gpucr.before_freeze
    def before() -> None:
        torch.cuda.empty_cache()
        note("before")

    @gpucr.after_restore
    def after() -> None:
        note("after")

    return step


def profiled() -> Step:
    """A training whose first steps torch.profiler records: CUPTI stays in the process when it has stopped."""
    torch = _seeded()
    step = _training(compile_it=False)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    recording = torch.profiler.profile(activities=activities)
    recording.start()

    def under_the_profiler(number: int) -> object:
        said = step(number)
        if number == PROFILED_STEPS:
            recording.stop()
        return said

    return under_the_profiler


def loader() -> Step:
    """A training that two worker processes of a DataLoader feed."""
    torch = _seeded()

    class Rows(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]  # torch is missing where types are checked
        def __len__(self) -> int:
            return 640

        def __getitem__(self, index: int) -> Any:
            return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))

    rows = torch.utils.data.DataLoader(
        Rows(), batch_size=64, num_workers=2, persistent_workers=True, shuffle=True,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip

    def endless() -> Iterator[Any]:
        while True:
            yield from rows

    batches = endless()
    next(batches)  # the workers are forked here, before CUDA
    model = torch.nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(_: int) -> object:
        inputs = next(batches).to("cuda")
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item().hex()

    return step


def mpi() -> Step:
    """A training that starts MPI after CUDA, as Lightning does: OpenMPI 4's daemon has inherited descriptors."""
    step = _training(compile_it=False)
    step(0)
    from mpi4py import MPI  # type: ignore[import-not-found]  # the import starts MPI, and `orted` with it

    if not _is_running("orted"):
        raise SystemExit("there is no orted")
    return lambda number: (step(number), MPI.COMM_WORLD.allreduce(number))


def _is_running(name: str) -> bool:
    """Whether there is a process of this name."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
            if file.read().strip() == name:
                return True
    return False


JOBS = {
    job.__name__.replace("_", "-"): job
    for job in (compiled, transformer, jax, cupy, cupy_async, numba, server, hooks, profiled, loader, mpi)
}


def main() -> None:
    """Run the job that was named."""
    import pace  # type: ignore[import-not-found]  # beside this program

    job, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    step = JOBS[job]()
    with contextlib.suppress(BrokenPipeError):
        for number in range(steps):
            pace.wait_for(number)
            print(number, step(number), flush=True)
            time.sleep(pause_s)


if __name__ == "__main__":
    main()
