"""What the source must not hold: unpickling, evaluation, YAML that runs code, shells, TLS without checks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVED = sorted(path for folder in ("agentguard", "engine_plugins") for path in (ROOT / folder).rglob("*.py"))
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "tempfile.mktemp", "ssl._create_unverified_context", "numpy.load", "np.load", "joblib.load",
}  # fmt: skip
ALLOWED: dict[str, set[str]] = {}
"""By file: calls of these names that are something else."""


def forbidden(source: str, allowed: set[str] = frozenset()) -> Iterator[str]:  # type: ignore[assignment]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"{node.lineno}: import {name}" for name in names if name.partition(".")[0] in FORBIDDEN_IMPORTS)
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
        if name in FORBIDDEN_CALLS - allowed:
            yield f"{node.lineno}: {name}(…)"
        if name == "torch.load" and not _is(keywords.get("weights_only"), True):
            yield f"{node.lineno}: torch.load without weights_only=True"
        for keyword, bad in (("shell", True), ("verify", False), ("trust_remote_code", True), ("allow_pickle", True)):
            if _is(keywords.get(keyword), bad):
                yield f"{node.lineno}: {keyword}={bad}"
        if any(_is(value, "pickle") for value in keywords.values()) or name.endswith((".recv_pyobj", ".send_pyobj")):
            yield f"{node.lineno}: {name}, which pickles"


def _is(node: ast.expr | None, value: object) -> bool:
    return (isinstance(node, ast.Constant) and node.value is value) or (
        isinstance(node, ast.Constant) and node.value == value == "pickle"
    )


@pytest.mark.parametrize("path", SERVED, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_comes_from_outside(path: Path) -> None:
    assert list(forbidden(path.read_text(), ALLOWED.get(str(path.relative_to(ROOT)), set()))) == []


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle", "from pickle import loads", "import os, dill", "from marshal import loads", "eval(x)", "exec(x)",
        "yaml.load(x)", "yaml.unsafe_load(x)", "os.system(x)", "subprocess.run(x, shell=True)", "torch.load(x)",
        "torch.load(x, weights_only=False)", "httpx2.get(x, verify=False)", "socket.recv_pyobj()", "np.load(x, allow_pickle=True)",
        "f(trust_remote_code=True)", "__import__(x)",
    ],
)  # fmt: skip
def test_each_of_them_would_be_found(bad: str) -> None:
    assert len(list(forbidden(f"def f():\n    {bad}\n"))) >= 1
