"""Click's usage errors in the shape of all others: what is wrong, and what to do."""

from __future__ import annotations

import re

import click

from gpucr.errors import InvalidRequest

_NUMBERS = {
    "is not a valid integer range.": "is not a whole number",
    "is not a valid integer.": "is not a whole number",
    "is not a valid float range.": "is not a number",
    "is not a valid float.": "is not a number",
}
"""Click names its types, which nobody has heard of."""
_OPTIONAL = re.compile(r"^\[([^\[\]]+)\](?=$|\.)")


def as_invalid_request(error: click.ClickException) -> InvalidRequest:
    """The same error as one of gpucr's own. Its hint names the command whose help answers it."""
    return InvalidRequest(_message(error), hint=_hint(error))


def shows_help(error: click.ClickException) -> bool:
    """Whether a group was called without a command: click 8.2 and newer raise an error that has the group's help."""
    return isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ()))


def _message(error: click.ClickException) -> str:
    if isinstance(error, click.MissingParameter):
        return f"{name_of(error.param)} is missing{_choices(error)}"
    if isinstance(error, click.NoSuchOption):
        return f"there is no option {error.option_name}"
    if isinstance(error, click.BadParameter):
        said = error.message
        for words, plain in _NUMBERS.items():
            said = said.replace(words, plain)
        where = f"{name_of(error.param)}: " if isinstance(error.param, click.Option) else ""
        return where + said.rstrip(".")
    said = error.format_message().rstrip(".")
    if found := re.match(r"Got unexpected extra arguments? \((.*)\)$", said, re.DOTALL):
        return f"too many arguments: {found[1]}"
    return said[:1].lower() + said[1:] if said[1:2].islower() else said


def name_of(param: click.Parameter | None) -> str:
    """An option's longest name, or what the usage line calls an argument."""
    if param is None:
        return "a value"
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return _OPTIONAL.sub(r"\1", (param.metavar or param.human_readable_name).removeprefix("[--] "))


def _choices(error: click.MissingParameter) -> str:
    kind = error.param.type if error.param is not None else None
    return f": one of {', '.join(map(str, kind.choices))}" if isinstance(kind, click.Choice) else ""


def _hint(error: click.ClickException) -> str | None:
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return None
    if isinstance(error, click.NoSuchOption):
        if isinstance(context.command, click.Group) and error.option_name in {"--json", "-q", "--quiet", "-v"}:
            return f"options follow the command: {context.command_path} COMMAND {error.option_name}"
        if error.possibilities:
            return f"did you mean {' or '.join(sorted(error.possibilities))}?"
    own = getattr(error, "hint", None)
    if isinstance(own, str):
        return own
    return f"`{context.command_path} --help` shows how to use it"
