"""`gpucr store`: making a store, and the keys that open it."""

from __future__ import annotations

from pathlib import Path

import click

from gpucr.cli.keys import ask_new, given_key, key_file_option, new_key, read_key_file, with_key
from gpucr.cli.options import complete_folder, json_option
from gpucr.cli.output import print_json
from gpucr.cli.suggesting import SuggestingGroup
from gpucr.errors import InvalidRequest
from gpucr.operations.stores import init_store, store_keys


@click.group("store", cls=SuggestingGroup)
def command() -> None:
    """Make a store of snapshots, and manage the keys of an encrypted one.

    \b
    Example:
      gpucr store init /var/snapshots/store
      gpucr dump 4711 --to /var/snapshots/store#before-lunch
      gpucr ls /var/snapshots/store
    """


@command.command("init")
@click.argument("store", metavar="STORE", shell_complete=complete_folder)
@click.option("--encrypt", is_flag=True, help="Encrypt all that is stored.")
@click.option(
    "--shared-with-group",
    metavar="GROUP",
    help="Members of GROUP dump to it and restore; root alone prunes it.",
)
@key_file_option
@json_option
def init(*, store: str, encrypt: bool, shared_with_group: str | None, key_file: Path | None, as_json: bool) -> None:
    """Make a store in the new or empty folder, or at the URL, STORE.

    \b
    Example:
      gpucr store init /var/snapshots/store
      gpucr store init s3://bucket/prefix --encrypt --key-file /root/store.key
      sudo gpucr store init /srv/snapshots --shared-with-group research
    """
    if not encrypt and given_key(key_file) is not None:
        raise InvalidRequest("a key was given, and the store would not be encrypted", hint="add --encrypt")
    key = new_key(key_file) if encrypt else None
    made = init_store(store, key=key, shared_with_group=shared_with_group)
    config = made.config
    if as_json:
        sizes = {"piece_bytes": config.piece_bytes, "pack_bytes": config.pack_bytes}
        data = {"store": made.backend.url, "id": config.store_id.hex(), "encrypted": config.encrypted}
        print_json("store.init", {**data, "hash": config.hash, **sizes, "shared_with_group": shared_with_group})
        return
    click.echo(f"{made.backend.url}: store made{', encrypted' if config.encrypted else ''}")


@command.command("keys")
@click.argument("store", metavar="STORE", shell_complete=complete_folder)
@click.option("--add-key-file", type=click.Path(path_type=Path), metavar="FILE", help="Add this key file.")
@click.option("--add-passphrase", is_flag=True, help="Ask for a passphrase and add it.")
@click.option("--remove", metavar="ID", help="Remove this key.")
@key_file_option
@json_option
def keys(
    *,
    store: str,
    add_key_file: Path | None,
    add_passphrase: bool,
    remove: str | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """List, add or remove the keys that open the encrypted store STORE. What is stored stays as it is.

    \b
    Example:
      gpucr store keys STORE --key-file old.key --add-key-file new.key
      gpucr store keys STORE --key-file new.key --remove 0f3a...
    """  # fmt: skip
    if add_key_file is not None and add_passphrase:
        raise InvalidRequest("one key can be added at a time", hint="omit --add-key-file or --add-passphrase")
    new = read_key_file(add_key_file) if add_key_file is not None else ask_new() if add_passphrase else None
    found = with_key(key_file, lambda key: store_keys(store, key=key, add=new, remove=remove))
    if as_json:
        print_json("store.keys", {"keys": [{"id": each.id, "kind": each.kind} for each in found]})
        return
    for each in found:
        click.echo(f"{each.id}  {each.kind}")
