"""`gpucr explain`: the page about an error code, from the installed package."""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from gpucr.cli.columns import terminal_width, wrapped
from gpucr.cli.options import json_option
from gpucr.cli.output import print_json
from gpucr.errors import InvalidRequest

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_SECTION = re.compile(r"^## (GPUCR-[A-Z0-9-]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_MOST_NEAR = 5
_WIDEST = 100
"""Longer lines are hard to read."""
_LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")


def pages() -> dict[str, str]:
    """Every code and its text, in the order of the file; links are reduced to their text."""
    text = (files("gpucr") / "error_codes.md").read_text(encoding="utf-8")
    return {code: _LINK.sub(r"\1", body).strip() for code, body in _SECTION.findall(text)}


class _Code(click.ParamType):  # type: ignore[type-arg]  # click 8.1 knows no arguments
    name = "code"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return f"GPUCR-{str(value).upper().removeprefix('GPUCR-')}"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(code) for code in pages() if code.startswith(incomplete.upper())]


@click.command("explain")
@click.argument("code", type=_Code(), required=False, metavar="[CODE]")
@json_option
def command(*, code: str | None, as_json: bool) -> None:
    """Print what the error code CODE means, why it occurs and what to do. Without CODE, list all codes.

    \b
    Example:
      gpucr explain GPUCR-LOCK-TIMEOUT
      gpucr explain lock-timeout
    """
    known = pages()
    if as_json and (code is None or code in known):
        chosen = known if code is None else {code: known[code]}
        print_json("explain", {"codes": [{"code": each, "text": body} for each, body in chosen.items()]})
        return
    if code is None:
        longest, width = max(map(len, known)), terminal_width()
        for each, body in known.items():
            click.echo("\n".join(wrapped(_first_sentence(body), width, first=f"{each:<{longest}}  ")))
        return
    if code not in known:
        bare = {each.removeprefix("GPUCR-"): each for each in known}
        word = code.removeprefix("GPUCR-")
        near = [bare[each] for each in bare if word and word in each.split("-")][:_MOST_NEAR]
        near = near or [bare[each] for each in difflib.get_close_matches(word, bare, n=_MOST_NEAR, cutoff=0.7)]
        raise InvalidRequest(
            f"there is no error code {code}",
            hint=f"did you mean {' or '.join(near)}?" if near else "`gpucr explain` lists all codes",
        )
    click.echo(f"{code}\n\n{_for_terminal(known[code], terminal_width())}")


def _for_terminal(body: str, width: int | None) -> str:
    """The page in lines of the terminal's width, without Markdown's marks for bold text; elsewhere as it is."""
    if width is None:
        return body
    size = min(width, _WIDEST)
    paragraphs = body.replace("**", "").split("\n\n")
    return "\n\n".join("\n".join(wrapped(" ".join(each.split()), size)) for each in paragraphs)


def _first_sentence(body: str) -> str:
    return re.split(r"(?<=[.:;])\s", body, maxsplit=1)[0].rstrip(".:;")
