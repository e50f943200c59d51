"""The knobs of TTS: each wrong one is refused by name."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import yaml

from agentguard import policy
from agentguard.errors import ConfigError
from agentguard.tts_settings import TtsSettings


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"stride": 0}, "tts.stride=0"),
        ({"stride": "5"}, "tts.stride='5'.*wrong type"),
        ({"rate": 2.0}, "tts.rate=2.0"),
        ({"rate": float("nan")}, "tts.rate=nan"),
        ({"scope": "last:0"}, "tts.scope='last:0'"),
        ({"scope": "layers"}, "full, head, last:N or lora:R"),
        ({"window": 8}, "tts.window=8"),
        ({"rows": "all"}, "tts.rows='all'"),
        ({"decay": 0}, "tts.decay=0"),
        ({"proximal": -1}, "tts.proximal=-1"),
        ({"top_k": -1}, "tts.top_k=-1"),
        ({"min_tokens": -1}, "tts.min_tokens=-1"),
        ({"clip": 0.0}, "tts.clip=0.0"),
        ({"reset": "batch"}, "tts.reset='batch'"),
        ({"auto_off": "yes"}, "tts.auto_off='yes'"),
        ({"lr": 1e-3}, "tts.lr=0.001"),
        ({"strid": 5}, "did you mean 'stride'"),
    ],
)
def test_a_wrong_knob_is_named(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TtsSettings.parse(raw)


def test_settings_are_changed_over_those_in_use() -> None:
    used = TtsSettings.parse({"stride": 10})
    changed = TtsSettings.parse({"scope": "lora:4"}, base=used)
    assert (changed.stride, changed.scope) == (10, "lora:4")
    assert TtsSettings.parse(asdict(changed)) == changed


def test_a_rate_as_yaml_reads_it() -> None:
    """YAML 1.1 takes 3e-4 for a string, as its numbers want a dot."""
    assert TtsSettings.parse({"rate": yaml.safe_load("3e-4")}).rate == 3e-4


def test_a_recipe_turns_it_on() -> None:
    base = {"model": "m", "draft": "d"}
    assert policy.parse(base).tts is None
    assert policy.parse(base | {"tts": {}}).tts == TtsSettings()
    found = policy.parse(base | {"tts": {"stride": 10}}).tts
    assert found is not None
    assert found.stride == 10
    with pytest.raises(ConfigError, match=r"tts\.strid"):
        policy.parse(base | {"tts": {"strid": 10}})
    with pytest.raises(ConfigError, match="without a draft model"):
        policy.parse({"model": "m", "tts": {}})
