"""The names of vLLM the plugin binds, in the versions of the support window: the installed one, and those written down here."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from engine_plugins.vllm import signatures
from engine_plugins.vllm.signatures import Found

WRITTEN = sorted(Path(__file__).with_name("vllm_signatures").glob("*.json"))


def read(path: Path) -> dict[str, Found | None]:
    held: dict[str, dict[str, Any] | None] = json.loads(path.read_text())
    return {
        where: None if found is None else Found(tuple(found["parameters"]), tuple(found["attributes"]))
        for where, found in held.items()
    }


@pytest.mark.parametrize("runner", signatures.RUNNERS)
def test_the_installed_vllm_has_them_all(runner: str) -> None:
    assert signatures.missing(runner) == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
@pytest.mark.parametrize("runner", signatures.RUNNERS)
def test_a_written_down_version_has_them_all(runner: str, path: Path) -> None:
    held = read(path)
    assert set(held) == {f"{n.module}:{n.name}" for n in signatures.NAMES}, "generate.py was not run since a name was added"
    assert signatures.missing(runner, lambda module, name: held[f"{module}:{name}"]) == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_the_seam_and_the_proxy_bind_to_a_written_down_version(path: Path) -> None:
    """By name, as `SeamV2` and `SamplerProxy` do it with what the runner passes by position."""
    held = read(path)
    module = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"

    def signature(where: str) -> inspect.Signature:
        found = held[where]
        assert found is not None
        return inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in found.parameters])

    called = signature(f"{module}:RejectionSampler.__call__").bind_partial("self", "logits", "batch", "draft", "invalid")
    assert called.arguments["input_batch"] == "batch"
    verified = signature(f"{module}_utils:rejection_sample").bind_partial(*range(12), use_fp64=False).arguments
    assert [verified[n] for n in ("target_logits", "draft_logits", "idx_mapping", "seed")] == [0, 1, 5, 9]


def test_the_window_s_upper_version_is_written_down() -> None:
    assert [path.stem for path in WRITTEN] == ["0.33"]


class TestWhatIsMissing:
    NAME = signatures.Name("V2", "m", "C", attributes=("a",))

    @pytest.mark.parametrize(
        ("name", "found", "said"),
        [
            (NAME, None, "m.C is gone"),
            (NAME, Found(attributes=("b",)), "m.C has no attribute 'a' any more"),
            (signatures.Name("V2", "m", "f", first=("x", "y")), Found(("x", "z")), "expected them to begin with ('x', 'y')"),
            (signatures.Name("V2", "m", "f", parameters=("x",)), Found(("z",)), "m.f has no parameter 'x' any more"),
        ],
    )
    def test_is_named(self, name: signatures.Name, found: Found | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(signatures, "NAMES", (name,))
        assert [said in sentence for sentence in signatures.missing("V2", lambda *_: found)] == [True]
        assert signatures.missing("V1", lambda *_: found) == []

    def test_is_read_from_source(self, tmp_path: Path) -> None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "m.py").write_text(
            "from other import made\nclass C:\n    field: int\n    def f(self, a, *, b=1): self.set = 1\ndef g(x): pass\n"
        )
        assert signatures.in_source(tmp_path, "vllm.m", "C") == Found(attributes=("f", "field", "set"))
        assert signatures.in_source(tmp_path, "vllm.m", "C.f") == Found(parameters=("self", "a", "b"))
        assert signatures.in_source(tmp_path, "vllm.m", "made") == Found()
        assert signatures.in_source(tmp_path, "vllm.m", "C.h") is None
        assert signatures.in_source(tmp_path, "vllm.gone", "C") is None
