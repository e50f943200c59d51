"""The command line as an interface: what it imports, its exit codes, what goes to which stream, hints and completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from agentguard.cli import COMMANDS, cli, main
from agentguard.configuration import gather
from agentguard.errors import AgentGuardError, ConfigError, EngineDiedError, EngineStartError

AGENTGUARD = [sys.executable, "-m", "agentguard"]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, **env: str) -> tuple[int, str, str]:
    done = subprocess.run([*AGENTGUARD, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **env})
    return done.returncode, done.stdout, done.stderr


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The console script in this process: the same `main`, without an interpreter's start."""
    before = sys.argv
    sys.argv = ["agentguard", *arguments]
    try:
        with pytest.raises(SystemExit) as caught:
            main()
    finally:
        sys.argv = before
    said = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int | None)
    return code or 0, said.out, said.err


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its path, groups included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


# cold start

STANDARD = frozenset(sys.stdlib_module_names)
HEAVY_STANDARD = (
    "asyncio",
    "ssl",
    "http",
    "email",
    "unittest",
    "multiprocessing",
    "sqlite3",
    "xml",
    "concurrent",
    "logging.config",
)


def loaded(*arguments: str) -> set[str]:
    code = (
        "import sys; sys.argv = ['agentguard', *sys.argv[1:]]\n"
        "from agentguard.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), sep='\\n', file=sys.stderr)"
    )
    # -S: what site-packages' .pth files import is no part of us
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-S", "-c", code, *arguments], capture_output=True, text=True, check=True, env=env)
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"], ["tui", "--help"], ["config", "--help"]])
def test_a_cold_start_loads_click_and_nothing_else_of_others(arguments: list[str]) -> None:
    """`--version` takes 37 ms of CPU over bare Python here; what is loaded is what it costs, and does not depend on the machine."""
    modules = loaded(*arguments)
    tops = {name.partition(".")[0] for name in modules}
    assert {"agentguard", "click"} <= tops
    assert {top for top in tops - STANDARD if not top.startswith("_")} == {"agentguard", "click"}
    if arguments[0] in ("--version", "--help"):
        ours = {name for name in modules if name.startswith("agentguard")}
        assert ours == {"agentguard", "agentguard.cli", "agentguard.errors", "agentguard.limits"}  # the last holds numbers alone
        assert not [name for name in HEAVY_STANDARD if name in modules]


def test_the_version_is_one_line_on_stdout() -> None:
    from agentguard import __version__

    assert run("--version") == (0, f"agentguard, version {__version__}\n", "")


# exit codes and streams


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (None, 0, ""),
        (AgentGuardError("it failed"), 1, "agentguard: it failed"),
        (EngineStartError("no engine"), 1, "agentguard: no engine"),
        (ConfigError("field", "value", "do this"), 2, "agentguard: field='value': do this"),
        (click.UsageError("no such option"), 2, "Error: no such option"),
        (EngineDiedError("gone"), 3, "agentguard: gone"),
        (KeyboardInterrupt(), 130, "agentguard: interrupted"),
        (SystemExit(1), 1, ""),
        (SystemExit(7), 7, ""),
    ],
)
def test_the_exit_status_says_what_kind_of_end_it_was(
    raised: BaseException | None, status: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 done, 1 failure or a finding, 2 usage or configuration, 3 try again, 130 interrupted; `wrap` passes the agent's on."""

    @click.command()
    def doctor() -> None:
        if raised is not None:
            raise raised

    monkeypatch.setattr("agentguard.cli.doctor.doctor", doctor)
    code, out, err = call(capsys, "doctor")
    assert (code, out) == (status, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["status", "--url", "http://127.0.0.1:9"], 3, "no gateway answers at http://127.0.0.1:9"),
        (["serve"], 2, "give a model's path, a recipe"),
        (["serve", "--recipe", "balancd"], 2, "did you mean 'balanced'"),
        (["serve", "M", "--set", "cutoff.f_mx=1"], 2, "did you mean 'f_max'"),
        (["proxy", "--set", "cutoff.f_max=1"], 2, "give a MODEL or --recipe with it"),
        (["config", "validate", "wrong.yaml"], 2, "did you mean 'rule'"),
        (["recipes", "check", "wrong.yaml"], 1, ""),
        (["recipes", "show", "none"], 2, "neither a file nor a recipe that ships"),
        (["tui", "--demo", "helthy", "--once"], 2, "did you mean 'healthy'"),
        (["completion", "tcsh"], 2, "'tcsh' is not one of"),
    ],
)
def test_what_goes_wrong_has_its_status_and_its_remedy(
    arguments: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text("model: m\nrul: strict\n")
    code, _, err = call(capsys, *arguments)
    assert (code, said in err) == (status, True), err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serv"], "did you mean 'serve'"),
        (["serve", "--recipee", "x"], "Did you mean '--recipe'"),
        (["tui", "--gatway", "x"], "Did you mean '--gateway'"),
        (["study", "rn"], "Did you mean 'run'"),
        (["recipes", "lst"], "Did you mean 'list'"),
        (["config", "shw"], "Did you mean 'show'"),
    ],
)
def test_a_word_nobody_knows_gets_the_nearest_one(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert hint in err


def test_every_command_has_a_line_of_help_and_every_option_too() -> None:
    seen = {path[0] for path, _ in commands()}
    assert seen == set(COMMANDS)
    for path, command in commands():
        assert command.help, path
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, (path, parameter.name)


def test_every_command_that_tells_something_speaks_json() -> None:
    """`completion` and `config schema` print one thing alone, which a program reads as it is; a study's folder holds its JSON."""
    without = {("completion",), ("config", "schema"), ("study", "full"), ("study", "report")}
    for path, command in commands():
        if not isinstance(command, click.Group) and path not in without:
            assert any("--json" in parameter.opts for parameter in command.params), path


def test_json_is_all_there_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["recipes", "list"], ["recipes", "check"], ["recipes", "show", "balanced"], ["config", "show", "--recipe", "balanced"],
        ["config", "validate"], ["config", "init"], ["wrap", "--list"], ["tui", "--demo", "healthy", "--speed", "100", "--once"],
    ):  # fmt: skip
        code, out, _ = call(capsys, *arguments, "--json")
        assert code in (0, 1), arguments
        assert json.loads(out), arguments


# warnings

HEAD = "model: ./none\ndraft: org/x-eagle3\nrule: cactus:delta=0.25\n"


def test_a_relaxed_rule_on_a_head_is_warned_of_where_one_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "head.yaml").write_text(HEAD)
    said = "λ rose to 3.30 with heads, against 0.90-1.06 with a standalone draft"
    code, _, err = call(capsys, "serve", "--recipe", "head.yaml", "--store", "memory")
    assert (code, said in err, "does not exist" in err) == (2, True, True), (
        "it is a warning: what ends the command is another thing"
    )
    code, out, _ = call(capsys, "recipes", "check", "head.yaml")
    assert (code, said in out) == (0, True)
    assert call(capsys, "recipes", "check", "--strict", "head.yaml")[0] == 1
    code, _, err = call(capsys, "config", "validate", "head.yaml")
    assert (code, said in err) == (0, True)
    monkeypatch.setattr("agentguard.doctor._plugin", list)  # what vLLM can do is asked in a process of its own
    code, out, _ = call(capsys, "doctor", "--recipe", "head.yaml", "--json")
    (found,) = [check for check in json.loads(out) if check["check"] == "policy: relaxed-head"]
    assert (found["ok"], found["warning"]) == (True, True)
    assert said in found["detail"]
    code, out, _ = call(capsys, "doctor", "--recipe", "head.yaml", "--rule", "strict", "--json")
    assert "nothing to warn of" in json.loads(out)[-1]["detail"]


# configuration


def test_what_init_writes_is_read_and_says_nothing_until_edited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".git").mkdir()
    code, out, _ = call(capsys, "config", "init")
    file = tmp_path / "agentguard.toml"
    assert (code, out.strip()) == (0, str(file))
    assert gather(environ={}).values == {}
    lines = [
        line.removeprefix("# ").partition("  #")[0] for line in file.read_text().splitlines() if " = " in line or "# [" in line
    ]
    file.write_text("\n".join(lines))
    assert set(tomllib.loads(file.read_text())) == {"model", "draft", "rule", "cutoff", "limits", "economics"}
    assert gather(environ={}).policy().cutoff.think_tokens == 4096, "the keys it shows are keys"
    code, _, err = call(capsys, "config", "init")
    assert (code, "replace it with --force" in err) == (2, True)
    assert call(capsys, "config", "init", "--user")[0] == 0
    assert (tmp_path / "config" / "agentguard" / "config.toml").is_file()


def test_show_names_the_source_of_each_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agentguard.toml").write_text('[economics]\nstore = "redis://me:secret@127.0.0.1/0"\n')
    monkeypatch.setenv("AGENTGUARD_PHASE", "both")
    code, out, _ = call(capsys, "config", "show", "M", "--set", "limits.steps=3")
    assert code == 0
    rows = {line.split(" = ")[0].strip(): line.partition(" = ")[2] for line in out.splitlines()}
    assert set(rows) == {"model", "phase", "limits.steps", "economics.store"}
    assert rows["model"].split() == ['"M"', "#", "command", "line"]
    assert rows["phase"].split() == ['"both"', "#", "AGENTGUARD_PHASE"]
    assert rows["economics.store"].startswith('"redis://me:***@127.0.0.1/0"')
    assert "secret" not in out


def test_validate_says_in_json_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.yaml").write_text("model: m\n")
    (tmp_path / "wrong.toml").write_text("rul = 1\n")
    code, out, _ = call(capsys, "config", "validate", "good.yaml", "wrong.toml", "--json")
    rows = json.loads(out)
    assert (code, [row["ok"] for row in rows]) == (2, [True, False])
    assert "did you mean 'rule'" in rows[1]["error"]


# completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_calls_us_back(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "completion", shell)
    assert code == 0
    assert f"_AGENTGUARD_COMPLETE={shell}_complete" in out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("agentguard ser", "serve"),
        ("agentguard recipes ", "check"),
        ("agentguard serve --reci", "--recipe"),
        ("agentguard serve --recipe bal", "balanced"),
        ("agentguard serve --rule cactus:", "cactus:delta=0.25"),
        ("agentguard completion z", "zsh"),
    ],
)
def test_a_shell_completes_commands_options_recipes_and_rules(words: str, wanted: str) -> None:
    parts = words.split(" ")
    code, out, _ = run(_AGENTGUARD_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(parts) - 1))
    assert code == 0
    assert f"plain,{wanted}" in out.splitlines()
