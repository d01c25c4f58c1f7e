"""``python3 -m benchmarks NAME``: each benchmark is a module of this folder that exports a click ``command``."""

from __future__ import annotations

import importlib

import click

BENCHMARKS = (
    "compare",
    "forwarding",
    "host-memory",
    "incremental",
    "interposed",
    "interposer-cost",
    "intervals",
    "many",
    "overhead",
    "ranks",
    "startup",
    "store",
    "store-dump",
)


class Benchmarks(click.Group):
    """Imports a benchmark when it is asked for: some need software that not every machine has."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, as ``--help`` shows them."""
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of the module with that name."""
        if cmd_name not in BENCHMARKS:
            return None
        command: click.Command = importlib.import_module(f"benchmarks.{cmd_name.replace('-', '_')}").command
        return command


@click.command(cls=Benchmarks)
def main() -> None:
    """Measure gpucr beside the plain driver and plain CRIU, in one run."""


if __name__ == "__main__":
    main(prog_name="python3 -m benchmarks")
