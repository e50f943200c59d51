"""LiteLLM's environment, configuration and key: what is refused before anything is started."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentguard.errors import ConfigError, EngineStartError
from agentguard.policy import load
from agentguard.proxy import environment
from agentguard.proxy.config import as_yaml, check_address, config, key_file, master_key
from agentguard.proxy.environment import check_lock, lock_file, own_litellm, prepare, refuse_compromised

HASH = f"--hash=sha256:{'0' * 64}"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments: str) -> tuple[int, str, str]:
    env = {**os.environ, "AGENTGUARD_PROXY_KEY": ""}
    done = subprocess.run([sys.executable, "-m", "agentguard", *arguments], capture_output=True, text=True, check=False, env=env)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "version",
    [
        "1.82.7",
        "1.82.8",
        "1.107.0",
        "1.107.0rc1",
        "1.107.9",
        "1.107",
        "1.82.07",
        "v1.82.7",
        "0!1.107.0",
        "1.0107.0",
        "1.82.7.0",
        "1.82.8+local",
    ],
)
def test_known_bad_releases_are_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(version)):
        refuse_compromised(version, "here")
    with pytest.raises(ConfigError, match=re.escape(version)):
        check_lock(f"litellm=={version} {HASH}\n", "lock")


@pytest.mark.parametrize("version", ["1.82.6", "1.82.9", "1.106.12", "1.108.7", "1.10.7"])
def test_other_releases_are_not(version: str) -> None:
    refuse_compromised(version, "here")


def test_the_lock_that_ships_names_every_wheel_by_its_hash() -> None:
    text = lock_file().read_text()
    pins = check_lock(text, "lock")
    assert pins["litellm"] == "1.106.12"
    assert len(pins) == sum(not line.startswith("#") for line in text.splitlines()) == 118
    assert "async-timeout" in pins, "redis wants it on Python 3.11.2"
    assert "://" not in text


@pytest.mark.parametrize(
    "line", ["litellm==1.106.12", f"litellm>=1.0 {HASH}", "litellm", "--index-url https://x.invalid", f"other==1.0 {HASH}"]
)
def test_a_lock_without_version_or_hash_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="lock"):
        check_lock(line + "\n", "mine.txt")


def make_litellm(root: Path, version: str) -> Path:
    (root / "lib/python3.11/site-packages" / f"litellm-{version}.dist-info").mkdir(parents=True)
    command = root / "bin" / "litellm"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\ntouch started\n")
    command.chmod(0o755)
    return command


def test_a_litellm_of_the_user_s_own_is_checked_without_starting_it(tmp_path: Path) -> None:
    good = make_litellm(tmp_path / "good", "1.106.12")
    assert own_litellm(tmp_path / "good") == own_litellm(good) == good
    bad = make_litellm(tmp_path / "bad", "1.107.0")
    link = tmp_path / "litellm"
    link.symlink_to(bad)
    for path in (bad, bad.parent.parent, link):
        with pytest.raises(ConfigError, match=r"1\.107\.0"):
            own_litellm(path)
    code, _, said = run("proxy", "--upstream", "http://127.0.0.1:9", "--litellm", str(bad))
    assert (code, "compromised" in said) == (2, True)
    assert not list(tmp_path.rglob("started"))
    unknown = tmp_path / "unknown"
    unknown.write_text("")
    with pytest.raises(ConfigError, match="version cannot be read"):
        own_litellm(unknown)


def test_an_interrupted_set_up_is_done_again_and_a_finished_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def make(python: str, root: Path, lock: Path, packages: int, progress: object, held: int) -> None:
        assert not root.exists()  # nothing of an earlier try is left
        made.append(root)
        make_litellm(root, "1.106.12")
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_make", make)
    monkeypatch.setattr(environment, "_python", lambda lock: sys.executable)
    with pytest.raises(KeyboardInterrupt):
        prepare()
    assert [prepare(), prepare()] == [made[0] / "bin" / "litellm"] * 2
    assert len(made) == 2


def test_pip_s_own_words_are_shown_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "mine.txt"
    lock.write_text(f"litellm==1.106.12 {HASH}\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(EngineStartError, match=r"(?s)mine\.txt.*[Nn]o matching distribution"):
        prepare(lock)
    assert not list((tmp_path / "cache").rglob(".complete"))


def test_the_key_is_strong_kept_and_its_owner_s_alone() -> None:
    key = master_key()
    assert len(key) == 67
    assert master_key() == key
    assert stat.S_IMODE(key_file().stat().st_mode) == 0o600
    assert stat.S_IMODE(key_file().parent.stat().st_mode) == 0o700
    key_file().chmod(0o644)
    assert master_key() == key
    assert stat.S_IMODE(key_file().stat().st_mode) == 0o600
    key_file().write_text("sk-short\n")
    with pytest.raises(ConfigError, match="remove the file"):
        master_key()


@pytest.mark.parametrize(
    ("host", "key", "public", "refused"),
    [
        ("127.0.0.1", None, False, ""),
        ("::1", None, False, ""),
        ("0.0.0.0", "k" * 32, False, "--allow-public"),
        ("0.0.0.0", None, True, "AGENTGUARD_PROXY_KEY"),
        ("192.0.2.1", "tiny", True, "at least 32"),
        ("0.0.0.0", "k" * 32, True, ""),
    ],
)
def test_a_public_address_needs_the_wish_and_a_key(host: str, key: str | None, public: bool, refused: str) -> None:
    if not refused:
        check_address(host, key, allow_public=public)
        return
    with pytest.raises(ConfigError, match=refused) as error:
        check_address(host, key, allow_public=public)
    assert key is None or key not in str(error.value)


def test_the_command_refuses_a_public_address() -> None:
    code, _, said = run("proxy", "--host", "0.0.0.0", "--upstream", "http://127.0.0.1:9")
    assert (code, "--allow-public" in said) == (2, True)
    code, _, said = run("proxy", "--host", "0.0.0.0", "--allow-public", "--upstream", "http://127.0.0.1:9")
    assert (code, "AGENTGUARD_PROXY_KEY" in said) == (2, True)


def test_the_configuration_is_closed_and_holds_no_secret() -> None:
    settings = config("org/model", "http://127.0.0.1:8484", keyed=True)
    assert [m["model_name"] for m in settings["model_list"]] == ["org/model", "*"]
    for model in settings["model_list"]:
        assert model["litellm_params"]["api_base"] == "http://127.0.0.1:8484/v1"
        assert model["litellm_params"]["api_key"] == "os.environ/AGENTGUARD_API_KEY"
    assert settings["general_settings"]["missing_session_id"] == "omit"
    assert settings["general_settings"]["forward_client_headers_to_llm_api"] is True
    assert settings["general_settings"]["cancel_on_disconnect"] is True
    assert settings["router_settings"]["disable_cooldowns"] is True
    assert settings["litellm_settings"]["num_retries"] == 0
    assert yaml.safe_load(as_yaml(settings)) == settings


def test_the_recipes_are_what_they_are_read_as() -> None:
    recipes = Path(__file__).parents[1] / "recipes"
    for path in (recipes / "agents.yaml", recipes / "replicas" / "replica.yaml"):
        assert load(path).engine.tool_parser == "hermes"
    compose = yaml.safe_load((recipes / "litellm-compose" / "compose.yaml").read_text())
    assert all(port.startswith("127.0.0.1:") for service in compose["services"].values() for port in service["ports"])
    own = config("*", "http://guard:8484", keyed=True)
    for path in recipes.glob("*/config.yaml"):
        settings = yaml.safe_load(path.read_text())
        assert settings["general_settings"].items() <= own["general_settings"].items()
        assert settings["litellm_settings"].items() <= own["litellm_settings"].items()
        assert own["router_settings"].items() <= settings["router_settings"].items()


def test_print_config_needs_nothing_that_runs() -> None:
    code, out, said = run("proxy", "--print-config", "--gateway", "http://127.0.0.1:9")
    assert code == 0
    assert yaml.safe_load(out)["litellm_settings"]["callbacks"] == "agentguard.integrations.litellm.hook"
    assert yaml.safe_load(out)["model_list"][0]["model_name"] == "MODEL"
    assert "MODEL" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["proxy", "--gateway", "http://127.0.0.1:9", "--litellm", "GOOD"], "nobody answers there"),
        (["proxy", "--gateway", "127.0.0.1:9"], "give a URL"),
        (["proxy", "some/model", "--gateway", "http://127.0.0.1:9"], "leave out MODEL"),
        (["wrap", "--proxy", "http://127.0.0.1:9", "--", "true"], "nobody answers there"),
        (["wrap"], "behind '--'"),
    ],
)
def test_what_cannot_be_started_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    make_litellm(tmp_path / "good", "1.106.12")
    code, _, said = run(*(str(tmp_path / "good") if a == "GOOD" else a for a in arguments))
    assert (code, message in said) == (2, True), said
