"""The documentation as a whole: it builds, links resolve, generated pages are what the code says, and its blocks are real."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml
from markdown_it import MarkdownIt

from agentguard import policy
from agentguard.cli import cli
from agentguard.errors import ConfigError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MARKDOWN = MarkdownIt("commonmark").enable("table")


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@cache
def written() -> list[Path]:
    """Every page of ours, in docs/ and beside the code."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return pages + [path for folder in ("docs", "examples", "recipes") for path in sorted((ROOT / folder).rglob("*.md"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# the site


def test_the_site_builds_without_a_warning_and_asks_nobody(tmp_path: Path) -> None:
    """8 s. A warning is a link or an anchor that is not there, a page outside of the navigation, a module that cannot be read."""
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        html = page.read_text()
        assert not re.findall(r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//", html), f"{page} loads something from elsewhere"
        assert not re.findall(r"<link[^>]+rel=\"(?:stylesheet|preload|preconnect)\"[^>]+href=\"(?:https?:)?//", html), page
    assert "class AgentGuardError" not in (tmp_path / "site" / "reference" / "api" / "index.html").read_text()
    assert "think_cap" in (tmp_path / "site" / "reference" / "api" / "index.html").read_text()


GENERATED = ("reference/cli.md", "reference/config.md", "reference/events.md", "reference/policy.schema.json", "llms.txt")


@pytest.mark.parametrize("name", GENERATED)
def test_what_the_code_says_is_what_the_page_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = script("reference_pages", monkeypatch)
    assert set(pages.PAGES) == set(GENERATED)
    assert (DOCS / name).read_text() == pages.PAGES[name](), "write it anew: python docs/reference_pages.py"


def test_every_command_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    paths = [context.command_path for context in script("reference_pages", monkeypatch).commands()]
    assert len(paths) > 15
    for path in paths:
        assert re.search(rf"^##+ {re.escape(path)}$", text, re.MULTILINE), path


def test_every_page_is_in_llms_txt() -> None:
    listed = set(re.findall(r"\]\(([^)]+\.md)\)", (DOCS / "llms.txt").read_text()))
    assert listed == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_the_figure_is_that_of_the_kept_study(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = script("acceptance_figure", monkeypatch)
    arms = json.loads(figure.STUDY.read_text())["arms"]
    assert figure.FIGURE.read_text() == figure.figure(arms), "draw it anew: python docs/acceptance_figure.py"
    # and what the page says about it
    far = [arm for arm in arms if abs(arm["gain"] - 1) > 0.07]
    assert {arm["rule"].split(":")[0] for arm in far} == {"top-k"}
    assert len(far) == 2
    assert f"{max(arm['lambda'] for arm in arms):.1f}" == "4.4"


# links


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them for the headings we write."""
    found = []
    tokens = MARKDOWN.parse(path.read_text())
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or () if child.type in ("text", "code_inline"))
            found.append(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text.strip().lower())))
    return frozenset(found)


@pytest.mark.parametrize("page", written(), ids=name_of)
def test_links_resolve(page: Path) -> None:
    for token in MARKDOWN.parse(page.read_text()):
        for child in token.children or ():
            target = child.attrGet("href" if child.type == "link_open" else "src") if child.type in ("link_open", "image") else None
            if not isinstance(target, str) or re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            assert path.exists(), target
            assert path.is_relative_to(ROOT), target
            if anchor:
                assert anchor in anchors(path), target


def test_a_path_that_an_error_or_a_docstring_names_is_there() -> None:
    for source in (*(ROOT / "agentguard").rglob("*.py"), *(ROOT / "engine_plugins").rglob("*.py")):
        for name in re.findall(r"(?<!, )\bdocs/[\w/.-]*\w\.(?:md|json|svg)", source.read_text()):
            assert (ROOT / name).is_file(), f"{source}: {name}"


# code blocks


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks() -> list[Block]:
    found = []
    for page in written():
        if name_of(page) == "docs/reference/cli.md":
            continue  # help texts, compared as they are
        for token in MARKDOWN.parse(page.read_text()):
            if token.type in ("fence", "code_block") and token.map is not None:
                found.append(Block(name_of(page), token.map[0] + 1, token.info.strip(), token.content))
    return found


KINDS = {"", "sh", "yaml", "toml", "text", "python"}


def test_every_block_says_a_kind_that_is_checked() -> None:
    assert {block.kind for block in blocks()} <= KINDS
    assert all(block.kind for block in blocks() if block.page.startswith(("docs/howto", "docs/tutorial")))


def lines(block: Block) -> Iterator[list[str]]:
    """The block's shell lines as words: continued lines joined, comments, redirections and variables in front dropped."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    for line in text.splitlines():
        if not re.match(r"\s*(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:agentguard|python3?|make)(?: |$)", line):
            continue
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        ends = [i for i, word in enumerate(words) if re.match(r"(\d?>>?|<|\||&&)", word)]
        yield words[: ends[0]] if ends else words


SHELL = [(str(block), words) for block in blocks() if block.kind in ("", "sh") for words in lines(block)]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a reader is in: ours, with the files that examples take for given."""
    for name in ("recipes", "docs", "examples", "agentguard", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("big.yaml", "RECIPE", *re.findall(r"\b[\w-]+\.jsonl\b", " ".join(word for _, words in SHELL for word in words))):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [pytest.param(words, id=f"{at} {' '.join(words[:4])}") for at, words in SHELL])
def test_a_command_in_the_docs_is_one(words: list[str], reader: Path) -> None:
    program = words[0].removeprefix(".venv/bin/")
    if program == "agentguard":
        understood(words[1:])
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif len(words) > 2 and words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
    elif len(words) > 1 and words[1].endswith(".py"):
        page = next(at for at, line in SHELL if line is words).rpartition(":")[0]
        assert any((base / words[1]).is_file() for base in (ROOT, (ROOT / page).parent)), words[1]


def understood(words: list[str]) -> None:
    """Parse as the program would, and run nothing."""
    context = cli.make_context("agentguard", list(words))
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        assert rest, f"{words} ends with a group"
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None, name
        context = command.make_context(name, rest, parent=context)


def test_the_docs_name_commands_at_all() -> None:
    used = {words[1] for _, words in SHELL if words[0].endswith("agentguard")}
    assert used >= {"serve", "wrap", "proxy", "tui", "status", "study", "config", "recipes"}
    with pytest.raises(click.UsageError):
        understood(["serve", "--no-such-option"])


def is_policy(block: Block) -> bool:
    """Whether it is one is said by its kind, or by its first words where a page of old has none."""
    return block.kind in ("yaml", "toml") or (block.kind == "" and re.search(r"^\w+:( |$)", block.text, re.MULTILINE) is not None)


POLICIES = [block for block in blocks() if is_policy(block)]


@pytest.mark.parametrize("block", POLICIES, ids=str)
def test_yaml_and_toml_in_the_docs_are_policies_or_of_another_program(block: Block) -> None:
    if block.kind == "":
        # two pages show a policy's lines in front of commands
        text = "\n".join(line for line in block.text.splitlines() if re.match(r"(\w+:|\s+\w+:|#)", line))
    else:
        text = block.text
    raw = tomllib.loads(text) if block.kind == "toml" else yaml.safe_load(text)
    others = {"scrape_configs", "groups", "theme", "keys"}
    if isinstance(raw, dict) and set(raw) & others:
        assert set(raw) <= others
        return
    if raw.get("tts") is not None:
        raw.setdefault("draft", "d")
    policy.parse({"model": "m"} | raw)


def test_a_wrong_policy_in_the_docs_would_be_found() -> None:
    assert len(POLICIES) >= 8
    with pytest.raises(ConfigError):
        policy.parse({"model": "m", "economics": {"arm": {}}})


PYTHON = [block for block in blocks() if block.kind == "python"]


@pytest.mark.parametrize("block", PYTHON or [pytest.param(None, marks=pytest.mark.skip("no page has Python"))], ids=str)
def test_python_in_the_docs_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


# docstrings


def api_modules() -> list[str]:
    return re.findall(r"^::: (\S+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public classes, functions and methods without a docstring of their own; one that dataclass makes up is none."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef

    def public(node: ast.AST) -> bool:
        return isinstance(node, ast.ClassDef | functions) and not node.name.startswith("_")

    if ast.get_docstring(tree) is None:
        yield "the module"
    for node in filter(public, tree.body):
        assert isinstance(node, ast.ClassDef | functions)
        if ast.get_docstring(node) is None:
            yield node.name
        for inner in filter(public, node.body if isinstance(node, ast.ClassDef) else []):
            assert isinstance(inner, ast.ClassDef | functions)
            if ast.get_docstring(inner) is None:
                yield f"{node.name}.{inner.name}"


@pytest.mark.parametrize("module", api_modules())
def test_every_public_name_of_the_api_has_a_docstring(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert list(undocumented(ast.parse(Path(spec.origin).read_text()))) == []
