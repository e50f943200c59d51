"""Where values come from, what is refused and how it is said; recipes; and what is warned of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from agentguard import policy as policies
from agentguard import recipes
from agentguard.cautions import cautions, head_drafter
from agentguard.configuration import (
    OTHERS,
    Layer,
    for_upstream,
    from_environment,
    from_options,
    gather,
    masked,
    merge,
    project_file,
)
from agentguard.errors import ConfigError
from agentguard.policy import NOT_MEASURED, Policy
from agentguard.reference import reference_model
from agentguard.rulespec import RuleSpec

ROOT = Path(__file__).parents[1]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory inside of a repository, and a user's folder, both empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    work = tmp_path / "repository" / "folder"
    work.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    (tmp_path / "config" / "agentguard").mkdir(parents=True)
    monkeypatch.chdir(work)
    return tmp_path


def test_the_stronger_layer_wins_key_by_key_and_each_source_is_known(place: Path) -> None:
    user = place / "config" / "agentguard" / "config.toml"
    user.write_text('phase = "both"\ncontent = true\n[cutoff]\nf_min = 0.5\nmargin = 1\n')
    (place / "repository" / "agentguard.toml").write_text("content = false\n[cutoff]\nmargin = 2\nf_max = 0.7\nloops = false\n")
    recipe = place / "recipe.yaml"
    recipe.write_text("model: from-recipe\ncutoff: {f_max: 0.8, answer_floor: 3}\n")
    environ = {"AGENTGUARD_CUTOFF__ANSWER_FLOOR": "4", "AGENTGUARD_RULE": "cactus:0.5", "AGENTGUARD_API_KEY": "k", "PATH": "x"}
    found = gather({"rule": "strict", "draft": None}, settings=["limits.steps=9"], recipe=recipe, environ=environ)
    policy = found.policy()
    cutoff = policy.cutoff
    assert (cutoff.f_min, cutoff.margin, cutoff.loops, cutoff.f_max, cutoff.answer_floor) == (0.5, 2, False, 0.8, 4)
    assert (policy.rule, policy.phase, policy.content, policy.model, policy.limits.steps) == (
        "strict",
        "both",
        False,
        "from-recipe",
        9,
    )
    sources = {key: source for key, _, source in found.rows(policy)}
    project = f"project file {place / 'repository' / 'agentguard.toml'}"
    assert sources["rule"] == sources["limits.steps"] == "command line"
    assert sources["cutoff.answer_floor"] == "AGENTGUARD_CUTOFF__ANSWER_FLOOR"
    assert sources["cutoff.f_max"] == sources["model"] == f"recipe {recipe}"
    assert sources["cutoff.margin"] == sources["content"] == project
    assert sources["cutoff.f_min"] == f"user file {user}"
    assert sources["cutoff.half_below"] == sources["economics.control"] == "default"
    nested = {"cutoff", "limits", "economics", "store", "serving", "engine"}  # about and tts are None here
    assert len(sources) == sum(len(value) if key in nested else 1 for key, value in policy.model_dump().items())


def test_a_section_is_turned_on_and_off_as_a_whole() -> None:
    on, off = Layer("low", {"tts": {"stride": 3}, "draft": "d"}), Layer("high", {"tts": None})
    assert merge([off, on]).policy(model="m").tts is None
    assert merge([on, off]).policy(model="m").tts is not None
    empty = merge([Layer("high", {"tts": {}}), on])
    tts = empty.policy(model="m").tts
    assert tts is not None
    assert tts.stride == 3
    assert empty.source("tts.stride") == "low"


def test_arms_are_taken_whole_and_not_mixed() -> None:
    low = Layer("low", {"economics": {"arms": {"cactus:delta=1": 1}, "control": 0.2}})
    high = Layer("high", {"economics": {"arms": {"lenience:l=0.3": 2}}})
    economics = merge([high, low]).policy(model="m").economics
    assert (economics.arms, economics.control) == ({"lenience:l=0.3": 2}, 0.2)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"AGENTGUARD_CUTOFF__F_MXA": "1"}, "AGENTGUARD_CUTOFF__F_MXA='cutoff.f_mxa': unknown key; did you mean 'f_max'"),
        ({"AGENTGUARD_CUTOF__F_MAX": "1"}, "no key of the policy; did you mean 'cutoff'"),
        ({"AGENTGUARD_CONTENTS": "1"}, "no key of the policy; did you mean 'content'"),
        ({"AGENTGUARD_RUEL": "strict"}, "no key of the policy; did you mean 'rule'"),
        ({"AGENTGUARD_MODEL__X": "1"}, "'model' holds a value and no keys"),
        ({"AGENTGUARD_CUTOFF__F_MAX": "[1"}, "is no value in YAML"),
    ],
)
def test_a_variable_that_looks_like_a_key_and_is_none_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_environment(environ)


def test_no_variable_that_we_read_ourselves_is_refused() -> None:
    sources = (path for folder in ("agentguard", "engine_plugins", "tests", "docs") for path in (ROOT / folder).rglob("*"))
    texts = [path.read_text() for path in sources if path.suffix in (".py", ".md") and path.name != "test_configuration.py"]
    names = {name for text in texts for name in re.findall(r"\bAGENTGUARD_([A-Z][A-Z0-9_]*[A-Z0-9])\b", text)}
    assert len(names) > 10
    for name in names:
        key = name.lower().replace("__", ".").partition(".")[0]
        assert key in OTHERS or key in Policy.model_fields, name


def test_variables_of_others_and_empty_ones_are_left_alone() -> None:
    others = {"AGENTGUARD_API_KEY": "x", "AGENTGUARD_TUI_THEME": "y", "AGENTGUARD_UPDATE_GOLDEN": "1", "AGENTGUARD_DRAFT": ""}
    assert from_environment(others).values == {}


def test_the_store_has_a_short_variable() -> None:
    policy = merge([from_environment({"AGENTGUARD_STORE": "sqlite:x.db"})]).policy(model="m")
    assert policy.store.url == "sqlite:x.db"
    both = {"AGENTGUARD_STORE__URL": "redis://h/0", "AGENTGUARD_STORE__LEASE_S": "5"}
    assert merge([from_environment(both)]).policy(model="m").store.lease_s == 5


def test_texts_are_taken_as_they_stand_and_other_values_as_yaml() -> None:
    environ = {
        "AGENTGUARD_MODEL": "1984", "AGENTGUARD_DRAFT": "null", "AGENTGUARD_ENGINE__TOOL_PARSER": "on",
        "AGENTGUARD_ECONOMICS__ARMS": "{'cactus:delta=1': 2}", "AGENTGUARD_CUTOFF": "{mode: off}",
    }  # fmt: skip
    policy = merge([from_environment(environ)]).policy()
    assert (policy.model, policy.draft, policy.engine.tool_parser, policy.cutoff.mode) == ("1984", None, "on", "off")
    assert policy.economics.arms == {"cactus:delta=1": 2}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cutoff.f_max", "write it as KEY=VALUE"),
        ("cutof.f_max=1", "did you mean 'cutoff'"),
        ("cutoff.f_mx=1", "did you mean 'f_max'"),
        ("rule.x=1", "'rule' holds a value and no keys"),
    ],
)
def test_a_setting_that_is_none_is_refused(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_options({}, [setting])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rul = 1", "did you mean 'rule'"),
        ("[cutoff]\nf_mn = 1", "did you mean 'f_min'"),
        ("[cutoff]\nf_max = 1.5", "(it stands in project file"),
        ('[cutoff]\nf_min = 0.9\nf_max = 0.8', "swap them (it stands in project file"),
        ('[engine]\nextra_args = ["--middleware", "x.y"]', "a project file comes with whatever was cloned"),
        ("model = ", "is not TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_said_with_the_file(place: Path, text: str, said: str) -> None:
    file = place / "repository" / "agentguard.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        gather(environ={}).policy(model="m")
    assert str(file) in str(caught.value)


def test_the_nearest_project_file_counts_and_none_outside_of_the_repository(place: Path) -> None:
    (place / "agentguard.toml").write_text("content = true\n")
    inner = place / "repository" / "folder"
    assert project_file(inner) is None
    pyproject = place / "repository" / "pyproject.toml"
    pyproject.write_text("[tool.other]\nx = 1\n")
    assert project_file(inner) is None
    pyproject.write_text("[tool.agentguard]\ncontent = true\n")
    assert project_file(inner) == pyproject
    assert gather(environ={}).policy(model="m").content
    (inner / "agentguard.yaml").write_text("phase: both\n")
    assert project_file(inner) == inner / "agentguard.yaml"
    (inner / "agentguard.toml").write_text("")
    with pytest.raises(ConfigError, match="keep one"):
        project_file(inner)


def test_a_project_file_that_others_can_write_is_refused(place: Path) -> None:
    file = place / "repository" / "agentguard.toml"
    file.write_text("content = true\n")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        gather(environ={})


@pytest.mark.parametrize(("text", "said"), [("[tool", "project file="), ("tool = 3", ""), ("[tool.agentguard]\nrul = 1", "'rule'")])
def test_a_pyproject_of_others_is_no_trouble_and_a_broken_one_is_named(place: Path, text: str, said: str) -> None:
    (place / "repository" / "pyproject.toml").write_text(text)
    if not said:
        assert gather(environ={}).values == {}
        return
    with pytest.raises(ConfigError, match=said) as caught:
        gather(environ={})
    assert "pyproject.toml" in str(caught.value)


def test_two_user_files_are_refused(place: Path) -> None:
    for name in ("config.toml", "config.yaml"):
        (place / "config" / "agentguard" / name).write_text("")
    with pytest.raises(ConfigError, match="keep one"):
        gather(environ={})


def test_the_users_model_is_not_that_of_an_upstream() -> None:
    low = Layer("user file f", {"model": "mine", "draft": "d", "tts": {}, "cutoff": {"margin": 3}})
    found = for_upstream(merge([low]))
    assert set(found.values) == {"cutoff"}
    named = for_upstream(merge([Layer("command line", {"model": "theirs"}), low]))
    assert named.values["model"] == "theirs"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("redis://user:secret@host:1/0", "redis://user:***@host:1/0"),
        ("redis://:secret@host/0", "redis://:***@host/0"),
        ("sqlite:/x@y", "sqlite:/x@y"),
        (["--api-key", "secret", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--hf-token=secret", "x"], ["--hf-token=***", "x"]),
        (3, 3),
    ],
)
def test_secrets_are_masked(value: Any, shown: Any) -> None:
    assert masked(value) == shown


def test_toml_and_yaml_are_one_schema(tmp_path: Path) -> None:
    raw = {
        "model": "m",
        "draft": "d",
        "tts": {"rate": 3e-4},
        "economics": {"arms": {"cactus:delta=1": 1.0}},
        "engine": {"dtype": "auto"},
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "a.toml").write_text(
        'model = "m"\ndraft = "d"\n[tts]\nrate = 3e-4\n[economics.arms]\n"cactus:delta=1" = 1\n[engine]\ndtype = "auto"\n'
    )
    assert policies.load(tmp_path / "a.yaml") == policies.load(tmp_path / "a.toml")


# recipes


def test_the_schema_that_is_checked_in_is_the_policys() -> None:
    kept = json.loads((ROOT / "docs" / "reference" / "policy.schema.json").read_text())
    assert kept == policies.schema(), "write it anew: agentguard config schema > docs/reference/policy.schema.json"
    jsonschema.Draft202012Validator.check_schema(kept)


@pytest.mark.parametrize("wrong", [{}, {"model": "m", "x": 1}, {"model": "m", "cutoff": {"x": 1}}, {"model": "m", "tts": {"x": 1}}])
def test_the_schema_refuses_what_the_policy_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, policies.schema())
    with pytest.raises(ConfigError):
        policies.parse(wrong)


def test_the_recipes_that_the_readers_look_for_ship() -> None:
    wanted = {"reference-pair", "agents", "claude-code", "codex", "opencode", "conservative", "balanced", "aggressive"}
    assert wanted <= set(recipes.shipped())


@pytest.mark.parametrize("name", recipes.shipped())
def test_a_recipe_validates_and_says_what_was_measured(name: str) -> None:
    path = recipes.shipped()[name]
    found = recipes.check(name, path)
    assert found.error == ""
    assert found.policy is not None
    assert found.policy.about is not None
    jsonschema.validate(yaml.safe_load(path.read_text()), policies.schema())
    about = found.policy.about
    if about.source is None:
        assert about.measured.startswith(NOT_MEASURED)
        return
    page = (ROOT / about.source).read_text()
    figures = re.findall(r"\d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\]|\d+% \[\d+%, \d+%\]", about.measured)
    assert figures
    for figure in figures:
        assert figure in page, f"{figure} is not in {about.source}"


@pytest.mark.parametrize("name", ["conservative", "balanced", "aggressive"])
def test_the_figures_of_a_trade_off_are_those_of_its_rules_row(name: str) -> None:
    """Not of some other row of the page."""
    policy = policies.load(recipes.shipped()[name])
    assert policy.about is not None
    rule = RuleSpec.parse(policy.rule)
    rows = []
    for line in (ROOT / "docs" / "rules.md").read_text().partition("<!-- measured")[2].partition("<!-- end")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 10:
            rows.append([*cells[1:9]])
            if not cells[1]:
                rows[-1][0] = rows[-2][0]
    (row,) = [r for r in rows if r[0] == f"`{rule.filtered_by(None, None)}`" and bool(r[1]) == rule.filtered]
    found = re.search(
        r"gain ([^,]+, [^,]+), λ ([^,]+, [^,]+), rounds ratio ([^,]+, [^,;]+), (\d+% \[\d+%, \d+%\]) right", policy.about.measured
    )
    assert found is not None
    assert list(found.groups()) == row[3:7]
    assert "n = 120, seed 7" in policy.about.measured


def test_figures_without_a_source_are_refused() -> None:
    with pytest.raises(ConfigError, match="figures without a source"):
        policies.parse({"model": "m", "about": {"summary": "s", "measured": "λ 0.5"}})


def test_a_recipe_that_is_neither_a_file_nor_shipped_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'balanced'"):
        recipes.named("balancd")
    with pytest.raises(ConfigError, match="No such file"):
        recipes.named("./none.yaml")


# cautions


def head(tmp_path: Path, **config: Any) -> str:
    folder = tmp_path / "some-draft"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "draft",
    [
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "org/Qwen3-8B_eagle3",
        "org/Qwen3-8B-DFlash-b16",
        "org/x-MTP",
        "org/medusa-7b",
        "a/P-EAGLE-x",
    ],
)
def test_a_head_is_known_by_its_name(draft: str) -> None:
    assert "its name says" in head_drafter(Policy(model="m", draft=draft))


@pytest.mark.parametrize("draft", ["Qwen/Qwen3-0.6B", "meta/Llama-3.1-8B", "org/beagle-1b", "org/smtp-model"])
def test_a_standalone_draft_is_none(draft: str) -> None:
    assert head_drafter(Policy(model="m", draft=draft)) == ""


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["DFlashDraftModel"]},
        {"architectures": ["Qwen3NextMTP"]},
        {"model_type": "medusa"},
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000},
    ],
)
def test_a_head_is_known_by_its_config(tmp_path: Path, config: dict[str, Any]) -> None:
    assert "its config.json" in head_drafter(Policy(model="m", draft=head(tmp_path, **config)))


def test_the_reference_draft_is_standalone_and_what_is_told_counts_first(tmp_path: Path) -> None:
    own = str(reference_model("draft"))
    assert head_drafter(Policy(model="m", draft=own)) == ""
    named = Policy.model_validate({"model": "m", "draft": own, "engine": {"draft_method": "eagle3"}})
    assert "draft_method is eagle3" in head_drafter(named)
    eagle = head(tmp_path, architectures=["Eagle3LlamaForCausalLM"])
    assert head_drafter(Policy.model_validate({"model": "m", "draft": eagle, "engine": {"draft_method": "draft_model"}})) == ""
    for arguments in (["--speculative-config", '{"method": "mtp"}'], ['--speculative-config={"method": "dflash", "model": "x"}']):
        assert "--speculative-config says" in head_drafter(
            Policy.model_validate({"model": "m", "engine": {"extra_args": arguments}})
        )


@pytest.mark.parametrize(
    ("rule", "draft", "warned"),
    [
        ("cactus:delta=0.25", "org/x-eagle3", True),
        ("cactus:delta=0", "org/x-eagle3", False),
        ("strict", "org/x-eagle3", False),
        ("cactus:delta=0.25", "org/x-0.6B", False),
    ],
)
def test_a_relaxed_rule_with_a_head_is_warned_of(rule: str, draft: str, warned: bool) -> None:
    found = cautions(Policy(model="m", draft=draft, rule=rule))
    assert [c.key for c in found] == (["relaxed-head"] if warned else [])
    if warned:
        assert "3.30" in found[0].text
        assert "standalone draft" in found[0].text


def test_arms_are_warned_of_too() -> None:
    policy = Policy.model_validate({"model": "m", "draft": "org/x-eagle3", "economics": {"arms": {"cactus:delta=1": 1}}})
    assert len(cautions(policy)) == 1
