"""What is allowed and yet known to go wrong; told by `doctor`, `serve` and `recipes check`, and never a reason to refuse."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from agentguard.policy import Policy
from agentguard.rulespec import RuleSpec

_IN_NAME = re.compile(r"(?<![a-z])(eagle-?3?|dflash|mtp|medusa|hydra|mlp[-_]speculator|p-?eagle|hass)(?![a-z])", re.IGNORECASE)
_IN_KIND = re.compile(r"[Ee]agle|EAGLE|[Dd][Ff]lash|DFLASH|MTP|mtp|[Mm]edusa|[Hh]ydra|mlp_speculator|MLPSpeculator")
_HEAD_KEYS = ("draft_vocab_size", "eagle_config", "dflash_config")
"""Signs of a drafter that is a head on the target's hidden states and no model of its own: in a name or method, in the architecture
its config.json names, and keys there."""


@dataclass(frozen=True, slots=True)
class Caution:
    """``key`` names the finding for programs, ``text`` says it to a person, with the remedy."""

    key: str
    text: str


def cautions(policy: Policy) -> list[Caution]:
    """All that is known to go wrong with this policy. Reads the draft's config.json where there is one."""
    rules = relaxed_rules(policy)
    if not rules:
        return []
    head = head_drafter(policy)
    if not head:
        return []
    one = rules[0] if len(rules) == 1 else f"{len(rules)} relaxed rules ({rules[0]}, …)"
    return [
        Caution(
            "relaxed-head",
            f"{one} meets a head drafter ({head}): the length ratio λ rose to 3.30 with heads, against 0.90-1.06 with a standalone "
            "draft model (arXiv 2610.23818); use a standalone draft, or rule: strict, and watch λ in 'agentguard status'",
        )
    ]


def relaxed_rules(policy: Policy) -> list[str]:
    """The rules of the policy that relax anything: its own, or those of its arms."""
    return [rule for rule in (policy.rule, *policy.economics.arms) if RuleSpec.parse(rule, what="rule").relaxed]


def head_drafter(policy: Policy) -> str:
    """Why the draft is taken for a head; "" for a standalone draft, for none, and for one that tells nothing.

    Looks at the method that vLLM is told (``engine.draft_method``, or a ``--speculative-config`` among ``engine.extra_args``), then
    at the draft's config.json, and last at its name.
    """
    told = _told_method(policy.engine.extra_args)
    if told and (found := _IN_NAME.search(told)):
        return f"--speculative-config says {found.group().lower()}"
    if policy.draft is None:
        return ""
    if policy.engine.draft_method == "eagle3":
        return "engine.draft_method is eagle3"
    if policy.engine.draft_method == "draft_model":
        return ""
    file = Path(policy.draft, "config.json")
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        config = None  # not on this disk, or broken, of which the engine's start says more
    if isinstance(config, dict):
        for kind in (*(config.get("architectures") or ()), config.get("model_type") or ""):
            if _IN_KIND.search(str(kind)):
                return f"its config.json says {kind}"
        for key in _HEAD_KEYS:
            if key in config:
                return f"its config.json has {key}"
        return ""
    name = _IN_NAME.search(Path(policy.draft).name)
    return f"its name says {name.group()}" if name else ""


def _told_method(arguments: tuple[str, ...]) -> str:
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--speculative-config", "-sc"):
            text = value if equals else arguments[number + 1] if number + 1 < len(arguments) else ""
            try:
                config = json.loads(text)
            except ValueError:
                return ""
            return f"{config.get('method', '')} {config.get('model', '')}" if isinstance(config, dict) else ""
    return ""
