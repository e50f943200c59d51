"""Set-ups under which a study would measure nothing, refused with what to change: some from the options, the others by a probe.

The probe asks for `lenience:l=0`, which accepts whatever is drafted, and looks at what the engine really did. That finds the CPU
kernel that throws its output away (engine_plugins/vllm/cpu_fixes.py), a draft without probabilities, a plugin that is not there
and rules that never ran, whatever the reason: 1 to 3 of 6 tokens are then accepted instead of nearly all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from agentguard.errors import AgentGuardError, ConfigError
from agentguard.policy import Policy
from agentguard.rulespec import RuleSpec
from agentguard.study.records import RoundStats

PROBE = RuleSpec.parse("lenience:l=0")
PROBE_REQUESTS, PROBE_TOKENS = 4, 48
ACCEPTED = 0.75
"""Share of the probe's drafted tokens that has to be accepted: all but those in rows that stay strict because the trace ends there.
With the CPU kernel that is not mended it is 1 to 3 of 6 (cpu_fixes.py)."""


class VoidError(AgentGuardError):
    """The study would be void."""


def check_policy(policy: Policy, rules: Iterable[RuleSpec], temperature: float) -> None:
    """Raises ConfigError for options that make a study void, before an engine is started."""
    relaxed = [str(rule) for rule in rules if rule.relaxed]
    if policy.draft is None:
        raise ConfigError("--draft", None, "a study compares verification rules, which need a draft; name one")
    if temperature <= 0 and relaxed:
        raise ConfigError("temperature", temperature, "greedy requests bypass relaxed rules, so the study would be void; use 1")
    args = policy.engine.extra_args
    if _given(args, "--generation-config") not in (None, "vllm"):
        raise ConfigError(
            "engine.extra_args", f"--generation-config {_given(args, '--generation-config')}",
            "the model's generation_config.json would silently override the study's sampling; leave the option out",
        )  # fmt: skip
    if _given(args, "--override-generation-config") is not None:
        raise ConfigError(
            "engine.extra_args", "--override-generation-config",
            "would silently override the study's sampling; leave it out and set the sampling of the requests",
        )  # fmt: skip
    speculative = _given(args, "--speculative-config")
    if speculative is not None and _method(speculative) != "probabilistic":
        raise ConfigError(
            "engine.extra_args", f"--speculative-config {speculative}",
            "keeps no draft probabilities, without which every rule runs as strict; add \"draft_sample_method\": \"probabilistic\"",
        )  # fmt: skip


def _given(args: Sequence[str], option: str) -> str | None:
    """The last value of an option, written --a b or --a=b; "" for one without a value."""
    value = None
    for i, arg in enumerate(args):
        name, equals, rest = arg.partition("=")
        if name == option or name.replace("_", "-") == option:
            value = rest if equals else (args[i + 1] if i + 1 < len(args) else "")
    return value


def _method(text: str) -> Any:
    try:
        config = json.loads(text)
    except ValueError:
        return None
    return config.get("draft_sample_method") if isinstance(config, dict) else None


def judge_probe(stats: Sequence[RoundStats], counted: int) -> None:
    """Raises VoidError where the probe's requests did not run as they were asked to. ``counted``: rounds by the engine's own
    counter."""
    rounds, drafted = sum(s.rounds for s in stats), sum(s.drafted for s in stats)
    if not counted:
        raise VoidError("the engine counted no verification round, so there is nothing to study; does it draft?")
    if not rounds:
        raise VoidError(
            "no telemetry came from the engine, so nothing can be said about its tokens; is agentguard's plugin installed there? "
            "('agentguard doctor' says)"
        )
    if sum(s.unjudged for s in stats):
        raise VoidError(
            "the draft keeps no probabilities, so every rule would run as strict; take a draft method that samples "
            '("draft_sample_method": "probabilistic")'
        )
    if not any(rule != "strict" for s in stats for rule in s.effective):
        raise VoidError(
            f"{PROBE} ran as strict in all {rounds} rounds of the probe; something keeps rules out here (a phase, forced rows)"
        )
    share = sum(s.accepted for s in stats) / drafted
    if share < ACCEPTED:
        raise VoidError(
            f"{PROBE} accepts everything, and the engine accepted {share:.0%} of {drafted} drafted tokens: its rejection kernel "
            "drops what it was given (a bug of vLLM's CPU build that agentguard's worker mends); run 'agentguard doctor'"
        )
