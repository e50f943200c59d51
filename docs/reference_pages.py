"""Writes the pages that say what the code says: commands, configuration, events, and llms.txt. Run `python docs/reference_pages.py`
after a change of one of them; a test holds the pages against the code."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from agentguard import events, policy
from agentguard.cli import cli
from agentguard.configuration import SECTIONS
from agentguard.tts_settings import TtsSettings

DOCS = Path(__file__).parent
HOW = "Written by `docs/reference_pages.py`; do not edit."
WIDTH = 100
CLI = f"""# Commands

<!-- {HOW} -->

Data goes to stdout, narration to stderr. An unknown command, option, recipe, rule or key is answered with the nearest one that is
known.

| exit status | means |
|---|---|
| 0 | done |
| 1 | it failed, or a check has a finding (`doctor`, `recipes check`, `tui --once` with an alarm) |
| 2 | an option, a recipe or a value of the configuration is wrong; nothing was done |
| 3 | nobody answers, or the engine is gone: the same command may work later |
| 130 | interrupted, by Ctrl-C or SIGTERM |

`wrap` passes the agent's own status on. Completion: `eval "$(agentguard completion bash)"`, or zsh, or fish.
"""
CONFIG = f"""# Configuration

<!-- {HOW} -->

One schema, in YAML or TOML, for recipes, the project file and the user file. From the strongest:

| layer | for example |
|---|---|
| command line | `--rule strict`, `--set cutoff.f_max=0.9` |
| environment | `AGENTGUARD_CUTOFF__F_MAX=0.9`: `__` is the dot, values are YAML, an empty one is not set |
| recipe | `--recipe NAME` of one that ships, or a file |
| project file | `agentguard.toml`, `agentguard.yaml`, or `[tool.agentguard]` in `pyproject.toml`, of this folder or the nearest \
above, up to the one with `.git` |
| user file | `~/.config/agentguard/config.toml` or `config.yaml` |
| default | the tables below |

Sections are merged key by key; lists, `economics.arms` and `economics.baseline` are taken whole. `agentguard config show` names the
source of each value, `config validate` checks, `config init` starts a file, `config schema` prints the
[JSON Schema](policy.schema.json).

A project file may not set `engine.extra_args`, which can name code to run, as it comes with whatever was cloned; nor is one taken
that others can write to. `proxy` and `wrap` start a model only when the command line or a recipe names one.

Keys and passwords are no part of it: `AGENTGUARD_API_KEY`, `AGENTGUARD_OPERATOR_KEY`, `AGENTGUARD_UPSTREAM_KEY`,
`AGENTGUARD_PROXY_KEY`. `AGENTGUARD_STORE=URL` is short for `store.url`. `AGENTGUARD_LOG_FORMAT` (console, json) and
`AGENTGUARD_LOG_LEVEL` are the log's.
"""
EVENTS = f"""# Events

<!-- {HOW} -->

`GET /agentguard/events` streams them as server-sent events; `--events FILE` of a study and `--record` of the monitor keep them as
JSON Lines. Each is an object whose `type` is the name below; a reader skips fields and types it does not know. `t` is UNIX time in
seconds. No event holds text of prompts, traces or answers. On the engine's own socket a `verification_step` travels as a
`packed_step` (`agentguard.events.PackedStep`); a gateway reads both, so update it before the engine.
"""


def commands(group: click.Command = cli, parent: click.Context | None = None, name: str = "agentguard") -> Iterator[click.Context]:
    """A context of each command, the group itself first."""
    own = group.context_settings if parent is None else {}
    group._help_option = None  # click keeps that of the first context it was asked in, which a test may have made without a parent
    context = click.Context(group, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH, **own)
    yield context
    if isinstance(group, click.Group):
        for inner in group.list_commands(context):
            command = group.get_command(context, inner)
            assert command is not None
            yield from commands(command, context, inner)


def cli_page() -> str:
    parts = [CLI]
    for context in commands():
        depth = "##" if context.command_path.count(" ") < 2 else "###"
        parts.append(f"{depth} {context.command_path}\n\n```text\n{context.get_help().rstrip()}\n```\n")
    return "\n".join(parts)


def _plain(annotation: Any) -> str:
    """A type as a reader of a recipe knows it."""
    if annotation is None or annotation is type(None):
        return "null"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _plain(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_plain(one) for one in arguments)
    if origin is typing.Literal:
        return ", ".join(str(one) for one in arguments)
    if origin in (list, tuple):
        inner = [one for one in arguments if one is not Ellipsis]
        return f"{'two texts' if len(inner) == 2 else f'list of {_plain(inner[0])}'}"
    if origin is dict:
        return f"mapping of {_plain(arguments[0])} to {_plain(arguments[1])}"
    names = {str: "text", int: "whole number", float: "number", bool: "true, false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(value: Any) -> str:
    return "required" if value is PydanticUndefined else f"`{json.dumps(value, ensure_ascii=False)}`"


def _rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        if not prefix and name in SECTIONS:
            continue
        default = info.default_factory() if info.default_factory else info.default  # type: ignore[call-arg]
        if isinstance(default, tuple):
            default = list(default)
        yield f"| `{prefix}{name}` | {_cell(_plain(info.annotation))} | {_default(default)} | {_cell(info.description or '')} |"


def config_page() -> str:
    head = "| key | value | default | |\n|---|---|---|---|"
    parts = [
        CONFIG,
        f"## Top level\n\n{head}\n" + "\n".join(_rows(policy.Policy)) + "\n",
    ]
    for section, model in (
        ("cutoff", policy.Cutoff), ("limits", policy.SessionLimits), ("economics", policy.Economics),
        ("store", policy.StoreOptions), ("serving", policy.ServingLimits), ("engine", policy.EngineOptions),
        ("about", policy.About),
    ):  # fmt: skip
        parts.append(f"## {section}\n\n{_cell(model.__doc__ or '')}\n\n{head}\n" + "\n".join(_rows(model, f"{section}.")) + "\n")
    defaults = TtsSettings()
    settings = ", ".join(f"`{name}: {json.dumps(getattr(defaults, name))}`" for name in SECTIONS["tts"])
    parts.append(f"## tts\n\n`tts: {{}}` turns it on with {settings}. What each does: [tts.md](../tts.md).\n")
    known = {"about", "cutoff", "limits", "economics", "store", "serving", "engine", "tts"}
    assert set(SECTIONS) == known, f"a section without a table: {set(SECTIONS) - known}"
    return "\n".join(parts)


def events_page() -> str:
    parts = [EVENTS]
    for struct in (*typing.get_args(events.Event), events.Verified, events.DraftRows, events.RequestRounds, events.ArmReport,
                   events.RatioReport, events.RunningStep):  # fmt: skip
        tag = struct.__struct_config__.tag
        parts.append(f"## {f'`{tag}`' if tag else struct.__name__}\n\n{_prose(struct.__doc__ or '')}\n")
        rows = []
        for one in msgspec.structs.fields(struct):
            if one.default is not msgspec.NODEFAULT:
                default = f"`{json.dumps(one.default)}`"
            else:
                default = f"`{json.dumps(one.default_factory())}`" if one.default_factory is not msgspec.NODEFAULT else ""
            rows.append(f"| `{one.name}` | {_cell(_type(one.type))} | {default} |")
        parts.append("| field | type | default |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _type(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, str) and hasattr(annotation, "__members__"):
        return ", ".join(str(one.value) for one in annotation.__members__.values())
    return _plain(annotation)


def _prose(doc: str) -> str:
    """A docstring's paragraphs, as one line each."""
    return "\n\n".join(" ".join(part.split()).replace("``", "`") for part in doc.split("\n\n"))


def pages(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """(section, page) of the site's navigation."""
    for entry in nav:
        ((title, inner),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
        if isinstance(inner, str):
            yield "", inner
        else:
            for page in inner:
                yield title, next(iter(page.values())) if isinstance(page, dict) else page


def llms() -> str:
    """llms.txt: what the project is, and its pages with their first sentence (llmstxt.org)."""
    site = yaml.load((DOCS.parent / "mkdocs.yml").read_text(), Loader=_Tolerant)
    parts = ["# agentguard\n", f"> {site['site_description']}\n"]
    section = None
    for title, page in pages(site["nav"]):
        if title != section:
            parts.append(f"\n## {title or 'Start'}\n")
            section = title
        text = (DOCS / page).read_text()
        heading = re.search(r"^# (.*)$", text, re.MULTILINE)
        assert heading is not None, page
        parts.append(f"- [{heading[1]}]({page}): {_first(text)}")
    return "\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


class _Tolerant(yaml.SafeLoader):
    """MkDocs' file names Python objects by tag, which are of no matter here."""


_Tolerant.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def _first(text: str) -> str:
    """The first sentence of the first paragraph, links as their words."""
    for block in text.split("\n\n"):
        if block.strip() and not block.lstrip("\n").startswith(("#", "<!--", "|", "![", "    ", "```", ":::", "-")):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
            return re.split(r"(?<=[.!?:]) (?=[A-Z`“\"])", plain)[0].rstrip(":")
    return ""


def schema() -> str:
    return json.dumps(policy.schema(), indent=1, ensure_ascii=False) + "\n"


PAGES = {
    "reference/cli.md": cli_page,
    "reference/config.md": config_page,
    "reference/events.md": events_page,
    "reference/policy.schema.json": schema,
    "llms.txt": llms,
}


def main() -> None:
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
