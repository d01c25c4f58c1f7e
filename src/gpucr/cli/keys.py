"""The key of an encrypted store: a key file, or a passphrase from the environment or the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from gpucr.errors import InvalidRequest, WrongKey
from gpucr.snapshot.location import is_store
from gpucr.undo.interrupts import not_over_yet

if TYPE_CHECKING:
    from gpucr.store.keys import Secret

T = TypeVar("T")

key_file_option = click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The key of an encrypted store. Default: the file that GPUCR_KEY_FILE names, or the passphrase in "
    "GPUCR_PASSPHRASE, or one that you type.",
)


def with_key(key_file: Path | None, call: Callable[[Secret | None], T], *, place: str | None = None) -> T:
    """Call it with the given key. Prompts for a passphrase if a store turns out to need one.

    Only on a terminal. ``place``: the location that the key is for, if that may be a plain folder, for which the
    environment's key is ignored. Raises InvalidRequest for an unusable key file, and the call's errors.
    """
    is_for_a_store = key_file is not None or place is None or is_store(place)
    key = given_key(key_file) if is_for_a_store else None
    try:
        return call(key)
    except WrongKey:
        if key is not None or not sys.stdin.isatty():
            raise
    not_over_yet()
    return call(_ask("Passphrase of the store", twice=False))


def given_key(key_file: Path | None) -> Secret | None:
    """The key that the option or the environment names; None: none was given. Raises InvalidRequest.

    An empty variable counts as unset.
    """
    named = key_file or os.environ.get("GPUCR_KEY_FILE")
    if named:
        return read_key_file(Path(named))
    passphrase = os.environ.get("GPUCR_PASSPHRASE")
    if not passphrase:
        return None
    return _secret().passphrase(passphrase)


def new_key(key_file: Path | None) -> Secret:
    """A key for a new store, or to add to one; prompts for a passphrase twice. Raises InvalidRequest."""
    key = given_key(key_file)
    if key is None and not sys.stdin.isatty():
        raise InvalidRequest(
            "no key was given, and there is no terminal to ask for a passphrase",
            hint="give --key-file FILE; a key file is made with: (umask 077; head -c 32 /dev/urandom > FILE)",
        )
    return key if key is not None else ask_new()


def ask_new() -> Secret:
    """Ask for a new passphrase on the terminal, twice."""
    return _ask("New passphrase", twice=True)


def _ask(prompt: str, *, twice: bool) -> Secret:
    return _secret().passphrase(click.prompt(prompt, hide_input=True, confirmation_prompt=twice, err=True))


def read_key_file(path: Path) -> Secret:
    """The key in this file. Raises InvalidRequest."""
    return _secret().in_file(path)


def _secret() -> type[Secret]:
    from gpucr.store.keys import Secret  # loads cryptography, and most commands have no key

    return Secret
