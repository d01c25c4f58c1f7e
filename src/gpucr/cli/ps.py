"""`gpucr ps`: who uses CUDA on this machine."""

from __future__ import annotations

import click

from gpucr.cli.options import json_option
from gpucr.cli.output import print_json
from gpucr.cli.processes import as_json_record, print_table
from gpucr.operations.listing import list_cuda_processes


@click.command("ps")
@json_option
def command(*, as_json: bool) -> None:
    """List the processes that use CUDA, suspended ones included.

    Without root, other users' processes are left out.

    \b
    Example:
      gpucr ps
    """
    found = list_cuda_processes()
    if as_json:
        print_json("ps", {"processes": [as_json_record(each) for each in found]})
    else:
        print_table(found)
