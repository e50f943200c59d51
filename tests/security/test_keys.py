"""`agentguard keys`, the keyring, and what `agentguard serve` asks of an address."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentguard.cli.keys import keys
from agentguard.errors import ConfigError
from agentguard.gateway import access, auth
from agentguard.gateway.app import create_app
from tests.security.rig import gate


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(keys, list(map(str, arguments)))
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_a_key_is_made_listed_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    text = run("add", "ci", "--file", file).strip()
    other = run("add", "anna", "--scope", "control", "--scope", "use", "--file", file).strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert text not in file.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["keys.json"]
    rows = json.loads(run("list", "--json", "--file", file))
    assert [(row["name"], row["scopes"]) for row in rows] == [("ci", ["use"]), ("anna", ["use", "control"])]
    assert "anna" in run("list", "--file", file)

    ring = auth.Keyring.of(file=file)
    found = ring.find(text)
    assert found is not None
    assert (found.name, found.scopes, ring.keyed) == ("ci", ("use",), True)
    run("revoke", "ci", "--file", file)
    ring._reload()
    assert ring.find(text) is None
    assert not ring.alive(found)
    assert ring.find(other) is not None
    with pytest.raises(ConfigError, match=r"WHICH='ci'.*known: anna"):
        run("revoke", "ci", "--file", file)
    with pytest.raises(ConfigError, match="NAME='anna': has a key already"):
        run("add", "anna", "--file", file)
    with pytest.raises(ConfigError, match="did you mean 'observe'"):
        run("add", "x", "--scope", "obsreve", "--file", file)


def test_secrets_are_long_and_never_the_same() -> None:
    made = [auth.new_key("k", ("use",)) for _ in range(100)]
    assert len({text for text, _ in made} | {key.id for _, key in made}) == 200
    assert all(len(text) >= 43 + 12 and text.isascii() for text, _ in made)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is no file of keys"),
        ('{"keys": [{"id": "a"}]}', "is no file of keys"),
        ('{"keys": [], "more": 1}', "is no file of keys"),
        ('{"keys": [{"id":"a","name":"","scopes":["all"],"digest":""}]}', "is no file of keys"),
        ('{"keys": [' + ",".join(['{"id":"a","name":"","scopes":[],"digest":""}'] * 2) + "]}", "an id twice"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=named):
        auth.Keyring.of(file=file)


async def test_a_broken_file_locks_nobody_out_and_a_missing_one_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "RELOAD_S", 0.0)
    file = tmp_path / "keys.json"
    async with gate(keys={"agent": ("use",)}, file=file) as g:
        assert (await g.ask("agent")).status_code == 200
        file.write_text("{")
        assert (await g.ask("agent")).status_code == 200
        file.unlink()
        assert (await g.ask("agent")).status_code == 401


@pytest.mark.parametrize(
    ("api_key", "operator_key", "open_scopes"),
    [(None, None, auth.ALL), ("a", None, set()), ("a", "o", set()), (None, "o", {"use", "observe"})],
)
def test_flags_as_before(api_key: str | None, operator_key: str | None, open_scopes: set[str]) -> None:
    ring = auth.Keyring.of(api_key, operator_key)
    assert ring.open_scopes == open_scopes
    for token, scopes in (
        (api_key, {"use", "observe"} | ({"control"} if operator_key is None else set())),
        (operator_key, set(auth.ALL)),
    ):
        if token is not None:
            found = ring.find(token)
            assert found is not None
            assert set(found.scopes) == scopes


@pytest.mark.parametrize(
    ("host", "given", "named"),
    [
        ("127.0.0.1", {}, ""),
        ("127.0.0.2", {}, ""),
        ("::1", {}, ""),
        ("localhost", {"api_key": "short"}, ""),
        ("0.0.0.0", {}, "is reachable from outside"),
        ("::", {}, "is reachable from outside"),
        ("10.0.0.1", {"operator_key": "o" * 40}, "is reachable from outside"),
        ("guard.lan", {}, "is reachable from outside"),
        ("0.0.0.0", {"api_key": "short"}, "api_key='5 characters'"),
        ("0.0.0.0", {"api_key": "a" * 32, "operator_key": "short"}, "operator_key='5 characters'"),
        ("0.0.0.0", {"api_key": "a" * 32}, ""),
        ("127.0.0.1", {"tls_cert": "x.pem"}, "needs --tls-cert and --tls-key together"),
        ("127.0.0.1", {"tls_clients": "x.pem"}, "needs --tls-cert and --tls-key together"),
        ("127.0.0.1", {"tls_cert": "x.pem", "tls_key": "y.pem"}, "tls_cert='x.pem': cannot be used"),
        ("127.0.0.1", {"keys": Path("none.json")}, "is not there"),
    ],
)
def test_what_an_address_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, given: dict[str, str], named: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    options = {"api_key": None, "operator_key": None} | given
    if not named:
        access.access_of(host, **options)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=named):
        access.access_of(host, **options)  # type: ignore[arg-type]


def test_the_user_s_own_keys_are_asked_for_without_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not access.access_of("127.0.0.1", api_key=None, operator_key=None).keys.asks
    text = run("add", "me").strip()
    opened = access.access_of("0.0.0.0", api_key=None, operator_key=None)
    assert opened.keys.find(text) is not None
    assert stat.S_IMODE(os.stat(auth.default_file().parent).st_mode) == 0o700  # noqa: PTH116


async def test_every_route_has_a_scope_and_every_scope_a_route() -> None:
    async with gate() as g:
        paths = {route.path for route in create_app(g.guard).routes}  # type: ignore[attr-defined]
    assert paths - auth.OPEN == set(auth.ROUTES)


@pytest.mark.parametrize("path", ["/nowhere", "/v1/chat/completions/", "/agentguard/../v1/models", "//v1/models", "/V1/models"])
async def test_only_the_very_path_is_a_route(tmp_path: Path, path: str) -> None:
    async with (
        gate(keys={"op": auth.SCOPES, "agent": ("use",)}, file=tmp_path / "k") as g,
        g.client("op") as op,
        g.client("agent") as agent,
    ):
        reply = await op.get(path)
        assert reply.status_code in (200, 404)  # httpx takes dots out itself
        if reply.status_code == 404:
            assert reply.json()["error"]["param"] == "path"
            assert "location" not in reply.headers
            assert (await agent.get(path)).status_code == 403
