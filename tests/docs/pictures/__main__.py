"""``python3 -m tests.docs.pictures [NAME...]``: make the pictures of the documentation again, all or some.

Drawings and plots are the same each time. Recordings run gpucr on the simulated driver, as root; `--drawn` leaves them
as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import click

from tests.docs.pages import DOCS
from tests.docs.pictures import casts, drawings, plots

FOLDER = DOCS / "pictures"
DRAWN: dict[str, Callable[[], str]] = {
    **drawings.DRAWINGS,
    **{name: functools.partial(plots.draw, name) for name in plots.PLOTS},
}
RECORDED: dict[str, Callable[[], str]] = {name: functools.partial(casts.record, name) for name in casts.CASTS}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*DRAWN, *RECORDED]), metavar="[NAME]...")
@click.option("--drawn", is_flag=True, help="Only drawings and plots: needs neither root nor CRIU.")
def main(names: tuple[str, ...], *, drawn: bool) -> None:
    """Make the pictures in docs/pictures again."""
    all_of_them = DRAWN if drawn else {**DRAWN, **RECORDED}
    for name in names or all_of_them:
        (FOLDER / f"{name}.svg").write_text({**DRAWN, **RECORDED}[name](), encoding="utf-8")
        click.echo(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
