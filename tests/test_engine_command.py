"""Which of vLLM's model runners `agentguard serve` asks for on a machine with a GPU."""

from __future__ import annotations

import pytest

from agentguard.engines import vllm_process
from agentguard.policy import Policy
from agentguard.reference import reference_model
from agentguard.tts_settings import TtsSettings


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "is_cpu_build", lambda: False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def policy(*, tts: bool) -> Policy:
    settings = TtsSettings() if tts else None
    return Policy(model=str(reference_model("target")), draft=str(reference_model("draft")), tts=settings)


@pytest.mark.parametrize(("tts", "asked", "v1"), [(False, None, False), (True, None, False), (True, "0", True)])
def test_the_runner_is_vllms_choice_unless_the_environment_has_one(
    tts: bool, asked: str | None, v1: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    environment = vllm_process.environment(policy(tts=tts), "key")
    flags = vllm_process.command(policy(tts=tts), 1, "ipc:///x")
    assert environment.get("VLLM_USE_V2_MODEL_RUNNER") == asked
    assert ("--no-async-scheduling" in flags) is v1
