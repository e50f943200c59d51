"""What the worker refuses before any request can run: never a silent no-op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import engine_plugins.vllm as plugin
from agentguard.errors import AgentGuardError
from engine_plugins.vllm import compat, worker
from engine_plugins.vllm.processor import AgentGuardParams
from tests import stock_kernels  # noqa: F401  # keeps the stock functions before a test here replaces them


def a_worker(
    *, runner: str = "V1", asynchronous: bool = False, settings: dict[str, Any] | None = None,
    method: str = "standard", sampled: str = "probabilistic", adaptive: bool = False, stages: int = 1, engines: int = 1,
    device: str = "cpu", **of_the_runner: Any,
) -> Any:  # fmt: skip
    config = SimpleNamespace(
        additional_config={"agentguard": settings or {}},
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        speculative_config=SimpleNamespace(
            rejection_sample_method=method, draft_sample_method=sampled, enable_adaptive_verification=adaptive
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, data_parallel_size=engines),
        reasoning_config=None,
    )
    kinds: dict[str, dict[str, Any]] = {
        "V1": {"_sample": None, "_bookkeeping_sync": None, "input_batch": None, "requests": {}},
        "V2": {"req_states": None, "sampler": SimpleNamespace(logits_processors=[AgentGuardParams()]), "rejection_sampler": None},
        "V3": {},
    }
    model_runner = SimpleNamespace(**{**kinds[runner], **of_the_runner})
    return SimpleNamespace(
        vllm_config=config, is_driver_worker=True, model_runner=model_runner, device=SimpleNamespace(type=device)
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "registered", True)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("faulty", "named"),
    [
        ({"runner": "V3"}, "use vLLM's V1 or V2"),
        ({"runner": "V2", "settings": {"tts": {}}, "adaptive": True}, "adaptive verification"),
        ({"runner": "V2", "settings": {"tts": {}}, "batch_sharder": 1}, "one of them teaches"),
        ({"settings": {"tts": {}}, "stages": 2}, "pipeline_parallel_size=2"),
        ({"runner": "V2", "settings": {"tts": {}}, "engines": 2}, "data_parallel_size=2"),
        ({"runner": "V2", "sampler": SimpleNamespace(logits_processors=[])}, "logits processor"),
        ({"runner": "V2", "rejection_sampler": SimpleNamespace()}, "a rejection sampler of its own"),
        ({"runner": "V2", "batch_sharder": 1, "settings": {"telemetry": "ipc:///x"}}, "batch-sharded sampling"),
        ({"asynchronous": True}, "--no-async-scheduling"),
        ({"settings": {"rul": "strict"}}, "did you mean 'rule'"),
        ({"settings": {"rule": "cactus:delta=-1"}}, "additional_config.agentguard.rule"),
        ({"method": "synthetic"}, "use 'standard'"),
    ],
)
def test_a_set_up_that_could_not_work_is_refused_with_the_remedy(faulty: dict[str, Any], named: str) -> None:
    with pytest.raises(AgentGuardError) as caught:
        worker.install(a_worker(**faulty))
    assert named in str(caught.value)


@pytest.mark.usefixtures("registered")
def test_strict_start_up_aborts_on_what_is_only_a_warning_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {f.name: f.reason for f in worker.features(a_worker(sampled="greedy"), {}, "V1") if not f.on}
    assert set(off) == {"rules", "support filter", "think budgets", "kernels", "warm-up"}
    assert "falls back to strict" in off["rules"]
    monkeypatch.setenv("AG_STRICT", "1")
    with pytest.raises(AgentGuardError, match="falls back to strict"):
        worker.install(a_worker(sampled="greedy"))


def test_strict_start_up_leaves_alone_what_nobody_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are off on a CPU; on a GPU that is a choice, and each relaxed step then waits for the device."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = {
        device: {f.name: f for f in worker.features(a_worker(device=device, runner="V2"), {}, "V2")} for device in ("cpu", "cuda")
    }
    assert [found["cpu"]["kernels"].on, found["cpu"]["kernels"].strict] == [False, False]
    assert found["cuda"]["kernels"].on
    monkeypatch.setenv("AG_KERNELS", "0")
    kernels = {f.name: f for f in worker.features(a_worker(device="cuda", runner="V2"), {}, "V2")}["kernels"]
    assert [kernels.on, kernels.strict] == [False, True]
    assert "AG_KERNELS=0" in kernels.reason


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("faulty", "named"),
    [
        ({}, "no --reasoning-parser"),
        ({"runner": "V2"}, "no --reasoning-parser"),
        ({"runner": "V2", "sampled": "greedy"}, "falls back to strict"),
    ],
)
def test_strict_start_up_aborts_on_any_feature_that_is_off(
    faulty: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AG_STRICT", "1")
    with pytest.raises(AgentGuardError, match=named):
        worker.install(a_worker(**faulty))


@pytest.mark.usefixtures("registered")
def test_a_vllm_whose_names_moved_is_refused_with_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.signatures, "installed", lambda module, name: None)
    with pytest.raises(AgentGuardError, match=r"rejection_sampler\.rejection_sample is gone"):
        worker.install(a_worker())


def test_an_unknown_version_is_refused_with_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.40.0")
    (feature,) = compat.gate()
    assert not feature.on
    assert "every name the plugin binds is there" in feature.reason
    installed = compat.signatures.installed

    def lacking(module: str, name: str) -> compat.signatures.Found | None:
        return None if name == "apply_thinking_budget" else installed(module, name)

    monkeypatch.setattr(compat.signatures, "installed", lacking)
    assert "apply_thinking_budget is gone" in compat.gate()[0].reason


def test_a_plugin_left_out_of_vllm_plugins_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "registered", False)
    with pytest.raises(AgentGuardError, match="VLLM_PLUGINS is set without 'agentguard'"):
        worker.install(a_worker())


@pytest.mark.usefixtures("registered")
def test_a_switched_off_plugin_does_not_start_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AG_DISABLE", "1")
    with pytest.raises(AgentGuardError, match="AG_DISABLE=1"):
        worker.install(a_worker())


def test_registering_says_why_it_is_off_and_strict_start_up_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "registered", False)
    monkeypatch.setenv("AG_DISABLE", "1")
    plugin.register()
    assert plugin.registered
    monkeypatch.setenv("AG_STRICT", "1")
    with pytest.raises(AgentGuardError, match="AG_DISABLE=1"):
        plugin.register()
