"""`agentguard keys`: the keys of a gateway's clients, observers and operators."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from agentguard.cli.options import JSON

FILE = click.option(
    "--file", type=click.Path(path_type=Path), help="The keys' file; default: keys.json in the user's state directory."
)


@click.group()
def keys() -> None:
    """Make, list and revoke the keys a gateway takes. The file keeps hashes; a key is shown once, when it is made."""


@keys.command()
@click.argument("name")
@click.option("--scope", "scopes", multiple=True, help="use, observe or control; may be given several times. Default: use.")
@FILE
@JSON
def add(name: str, scopes: tuple[str, ...], file: Path | None, as_json: bool) -> None:
    """Make a key for NAME and print it on stdout."""
    from agentguard.errors import ConfigError
    from agentguard.gateway import auth

    if not name.isprintable() or not 0 < len(name) <= 64:
        raise ConfigError("NAME", name, "give 1 to 64 printable characters, such as the agent's or the person's name")
    path = file or auth.default_file()
    known = auth.read_keys(path)
    if any(key.name == name for key in known):
        raise ConfigError("NAME", name, "has a key already; revoke it first, or choose another name")
    text, key = auth.new_key(name, auth.scopes_of(scopes or ("use",)))
    auth.write_keys(path, [*known, key])
    click.echo(f"key {key.id} for {name!r} may {', '.join(key.scopes)}; it is not shown again", err=True)
    click.echo(json.dumps({"id": key.id, "name": name, "scopes": list(key.scopes), "key": text}) if as_json else text)


@keys.command("list")
@JSON
@FILE
def list_(as_json: bool, file: Path | None) -> None:
    """Say who has which key, without the keys."""
    from agentguard.gateway import auth

    path = file or auth.default_file()
    known = auth.read_keys(path)
    if as_json:
        rows = [{"id": k.id, "name": k.name, "scopes": list(k.scopes), "created": k.created} for k in known]
        click.echo(json.dumps(rows, indent=1))
        return
    for key in known:
        made = time.strftime("%Y-%m-%d", time.gmtime(key.created))
        click.echo(f"{key.id}  {made}  {','.join(key.scopes):<20}  {key.name}")
    if not known:
        click.echo(f"no keys in {path}; make one with 'agentguard keys add NAME'", err=True)


@keys.command()
@click.argument("which")
@FILE
@JSON
def revoke(which: str, file: Path | None, as_json: bool) -> None:
    """Revoke the key with id or name WHICH; running gateways refuse it within seconds."""
    from agentguard.errors import ConfigError, nearest
    from agentguard.gateway import auth

    path = file or auth.default_file()
    known = auth.read_keys(path)
    left = [key for key in known if which not in (key.id, key.name)]
    if len(left) == len(known):
        raise ConfigError("WHICH", which, f"no such key in {path}; {nearest(which, [key.name for key in known])}")
    auth.write_keys(path, left)
    click.echo(f"revoked {which!r}; {len(left)} keys are left", err=True)
    if as_json:
        click.echo(json.dumps({"revoked": which, "left": len(left)}))
