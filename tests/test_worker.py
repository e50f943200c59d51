"""What the worker refuses before any request can run: never a silent no-op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import engine_plugins.vllm as plugin
from agentguard.errors import AgentGuardError
from engine_plugins.vllm import worker
from tests import stock_kernels  # noqa: F401  # keeps the stock functions before a test here replaces them


def a_worker(
    *, v2: bool = False, asynchronous: bool = False, settings: dict[str, Any] | None = None, method: str = "standard"
) -> Any:
    config = SimpleNamespace(
        additional_config={"agentguard": settings or {}},
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        speculative_config=SimpleNamespace(rejection_sample_method=method, draft_sample_method="probabilistic"),
        reasoning_config=None,
    )
    runner = SimpleNamespace(_sample=None, _bookkeeping_sync=None)
    return SimpleNamespace(vllm_config=config, use_v2_model_runner=v2, is_driver_worker=True, model_runner=runner)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "registered", True)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("faulty", "named"),
    [
        ({"v2": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
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
