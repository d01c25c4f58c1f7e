"""An HTTP server with a language model of random weights: it continues a seed, bit for bit the same each time.

``generating_server.py PORT GIB [TOKENS]`` needs torch and transformers. With ``--driver`` as the last word it has bytes
in device memory instead of a model, and needs libcuda.so.1 alone: GIB is then in MiB. ``GET /SEED`` answers with the
tokens, ``GET /health`` without the model.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HIDDEN, BETWEEN, WORDS = 4096, 11008, 32000
LAYER_BYTES = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * BETWEEN)


def transformers_model(gib: float, tokens: int) -> Callable[[int], str]:
    """A Llama of this size in bfloat16. Returns what continues a seed, always with the most likely token."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts: for equal results
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(23)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=BETWEEN,
        num_hidden_layers=max(1, int(gib * (1 << 30) / LAYER_BYTES)),
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=512,
        attn_implementation="eager",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()

    def answer(seed: int) -> str:
        made = torch.Generator().manual_seed(seed)
        known = torch.randint(0, WORDS, (1, 16), generator=made).to(device)
        with torch.inference_mode():
            for _ in range(tokens):
                logits = model(input_ids=known, use_cache=False).logits
                known = torch.cat([known, logits[:, -1:].argmax(dim=-1)], dim=1)
        words = [str(int(token)) for token in known[0, 16:]]
        return " ".join([*words, float(logits[0, -1].max()).hex()])  # one wrong bit of the weights shows there

    return answer


def driver_model(mib: float, tokens: int) -> Callable[[int], str]:
    """Bytes in device memory: an answer is a digest of them and of the seed."""
    from tests.hardware.programs.driver_recurrence import DeviceBuffer

    buffer = DeviceBuffer(int(mib) << 20)
    buffer.write(hashlib.shake_128(b"gpucr").digest(1 << 20))

    def answer(seed: int) -> str:
        buffer.make_current()
        return hashlib.sha256(b"%d %d " % (seed, tokens) + buffer.read(0, 1 << 20)).hexdigest()

    return answer


class Handler(BaseHTTPRequestHandler):
    """One answer at a time."""

    protocol_version = "HTTP/1.1"
    answer: Callable[[int], str]
    turn = threading.Lock()

    def do_GET(self) -> None:
        """See the module."""
        with self.turn:
            text = "well" if self.path == "/health" else self.answer(int(self.path[1:]))
        data = text.encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    """Serve until killed."""
    words = [word for word in sys.argv[1:] if word != "--driver"]
    tokens = int(words[2]) if len(words) > 2 else 8
    make = driver_model if "--driver" in sys.argv else transformers_model
    made = make(float(words[1]), tokens)
    made(0)  # cuBLAS loads what it needs at the first call
    Handler.answer = staticmethod(made)
    with Server(("127.0.0.1", int(words[0])), Handler) as served:
        print("ready", flush=True)
        served.serve_forever()


if __name__ == "__main__":
    main()
