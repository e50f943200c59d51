"""docs/sdk.md: its code runs, and it names what there is; every public name says what it is."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agentguard
from agentguard import errors
from tests.conftest import RunningStack

PAGE = Path(__file__).parents[2] / "docs" / "sdk.md"
GATEWAY = "http://127.0.0.1:8484"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_the_code_of_the_page_runs(running: RunningStack, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, in one namespace, as a reader would paste them."""
    engine = running.stack.engine
    names: dict[str, Any] = {"SERVER": f"{engine.url}/v1"}
    said = []
    assert len(blocks()) == 6
    for block in blocks():
        source = block.replace(GATEWAY, running.stack.url).replace('api_key="none"', f"api_key={engine.api_key!r}")
        code = compile(source, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = types.FunctionType(code, names)()
        if inspect.iscoroutine(done):
            await done
        said.append(capsys.readouterr().out)
    first, second, third, fourth, fifth, sixth = said
    assert re.search(r"\d \S*\n\Z", first), first
    assert re.search(r"answer:", second)
    assert re.search(r"^\d+ tokens in \d+ steps$", second, re.MULTILINE)
    assert re.search(r"1 \d+ None \(\)\n\Z", third), third
    assert fourth.strip()
    assert "a=0" in fifth
    assert re.search(r"\d\n\Z", sixth), sixth


def test_the_page_names_every_event_and_every_error() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    events = {kind.__name__ for kind in typing.get_args(agentguard.StepEvent)}
    public_errors = {name for name in agentguard.__all__ if name.endswith("Error")}
    assert named == events | public_errors - {"AgentGuardError"}


# -- every public name has a docstring ------------------------------------------------------------------------------------------


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties a class defines itself."""
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"{kind.__name__}.{name}", value.fget
        elif inspect.isfunction(value) or isinstance(value, classmethod | staticmethod):
            yield f"{kind.__name__}.{name}", getattr(value, "__func__", value)


def public() -> Iterator[tuple[str, Any]]:
    for name in agentguard.__all__:
        value = getattr(agentguard, name)
        if isinstance(value, type) or inspect.isfunction(value):
            yield name, value
        if isinstance(value, type) and value.__module__.startswith("agentguard"):
            yield from members(value)


def own_docstring(value: Any) -> str:
    """Not one that is inherited or made up by dataclasses."""
    doc = inspect.cleandoc(vars(value).get("__doc__") or "") if isinstance(value, type) else inspect.getdoc(value) or ""
    return "" if isinstance(value, type) and doc.startswith(f"{value.__name__}(") else doc


def test_every_public_name_has_a_docstring() -> None:
    found = dict(public())
    assert {"connect", "wrap", "Session.stream", "Session.budget", "StepStream.close_now", "Budget.fill"} <= found.keys()
    assert len(found) > 70
    assert [name for name, value in found.items() if len(own_docstring(value)) < 15] == []


RAISE = ("connect", "wrap", "Session.stream", "Session.complete", "Session.raise_limit", "StepRequest.copy", "Connection.session")
DEFAULTS = {"max_tokens", "think_tokens", "temperature", "rule", "timeout_s"}
"""Of a session, described where they are used."""


def test_the_docstrings_name_parameters_and_errors() -> None:
    """What one calls says what it raises; what one calls with options names each of them."""
    found = dict(public())
    assert [name for name in RAISE if "Raises" not in own_docstring(found[name])] == []
    for function, elsewhere in ((agentguard.connect, set()), (agentguard.wrap, set()), (agentguard.Connection.session, DEFAULTS)):
        parameters = set(inspect.signature(function).parameters) - {"self", "extra"} - elsewhere
        assert [name for name in parameters if not re.search(rf"\b{name}\b", own_docstring(function))] == []
    request = own_docstring(agentguard.StepRequest)
    assert [f for f in inspect.signature(agentguard.StepRequest).parameters if f"``{f}``" not in request] == []


def test_the_events_name_their_fields() -> None:
    for kind in typing.get_args(agentguard.StepEvent):
        if kind.__module__ != "agentguard.sdk.events":
            continue  # the guard's own are described in agentguard.events
        doc = own_docstring(kind)
        missing = [
            f.name for f in msgspec.structs.fields(kind) if f.name not in ("text", "id", "name") and f"``{f.name}``" not in doc
        ]
        assert missing == [], kind


def test_every_error_is_in_the_tree_that_is_drawn() -> None:
    drawn = set(re.findall(r"(\w+Error)\b", errors.__doc__ or ""))
    assert {name for name, value in vars(errors).items() if isinstance(value, type) and name.endswith("Error")} == drawn


# -- the lazy names ---------------------------------------------------------------------------------------------------------------


def test_the_sdk_and_the_package_name_the_same() -> None:
    import agentguard.sdk

    named = set(agentguard.sdk.__all__)
    assert named == set(agentguard.__all__) - {"__version__"}
    assert all(getattr(agentguard, name) is getattr(agentguard.sdk, name) for name in named)
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = agentguard.conect  # type: ignore[attr-defined]
    assert set(agentguard.__all__) <= set(dir(agentguard))


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import agentguard", ("agentguard.sdk", "pydantic", "msgspec", "httpx2", "structlog", "yaml", "click", "rich")),
        (
            "import agentguard; agentguard.connect",
            ("torch", "vllm", "litellm", "textual", "openai", "zmq", "uvicorn", "starlette", "redis", "prometheus_client"),
        ),
    ],
)
def test_imports_stay_light(code: str, forbidden: tuple[str, ...]) -> None:
    """Modules, not seconds: of the package itself nothing, of the SDK no server and no engine."""
    script = f"import sys; {code}; print(*[m for m in {forbidden!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
