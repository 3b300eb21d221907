"""`noria keys`: make, list and revoke the API keys of the proxy."""

import json
from typing import Annotated

import typer

from noria.config import load
from noria.contracts.access import Scope
from noria.stores.api_keys import ApiKeys, key_to_json
from noria.stores.online import OnlineStore

keys = typer.Typer(help="API keys of the proxy's callers.", no_args_is_help=True)


@keys.command()
def create(
    scope: Annotated[list[Scope], typer.Option(help="What the key may do; give it again for several.")],
    tenant: Annotated[str | None, typer.Option(help="Whose key it is; proxy.tenant if not given.")] = None,
    name: Annotated[str, typer.Option(help="What it is for, as `noria keys list` shows it.")] = "",
) -> None:
    """Make a key and print it, once: only a hash of it is kept. A running proxy takes it within a second.

    The key stands alone on stdout, so that a script can keep it: KEY=$(noria keys create --scope call).
    """
    config = load()
    store = OnlineStore(config.store_url)
    try:
        text, key = ApiKeys(store).create(tenant or config.proxy.tenant, scope, name)
    finally:
        store.close()
    typer.echo(text)
    scopes = ", ".join(sorted(key.scopes))
    typer.echo(f"{key.id} of tenant {key.tenant} ({scopes}); its text is not shown again", err=True)


@keys.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only keys of this tenant.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each key.")] = False,
) -> None:
    """Print every key, revoked ones too; never its text, which nobody has."""
    store = OnlineStore(load().store_url)
    try:
        found = ApiKeys(store).all(tenant)
    finally:
        store.close()
    for key in found:
        if as_json:
            typer.echo(json.dumps(key_to_json(key)))
            continue
        state = "in use" if key.revoked_at is None else f"revoked {key.revoked_at:%Y-%m-%d %H:%M}"
        scopes = ",".join(sorted(key.scopes))
        made = f"{key.created_at:%Y-%m-%d %H:%M}"
        typer.echo(f"{key.id}  {key.tenant:<16}  {scopes:<28}  {made}  {state:<24}  {key.name}")


@keys.command()
def revoke(key_id: Annotated[str, typer.Argument(help="The id, key_…, as `noria keys list` shows it.")]) -> None:
    """Close a key for ever. A running proxy refuses it within a second."""
    store = OnlineStore(load().store_url)
    try:
        key = ApiKeys(store).revoke(key_id)
    finally:
        store.close()
    typer.echo(f"{key.id} of tenant {key.tenant} is revoked")
