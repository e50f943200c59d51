"""The `prose` suite: long free text, for drafters with a real vocabulary. There is nothing to grade."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = (
    "a long story", "a detailed essay", "a step by step guide", "a chapter of a textbook", "a long letter",
    "a dialogue of two experts",
)  # fmt: skip
TOPICS = (
    "a lighthouse keeper in winter", "how bridges carry load", "the history of bread", "learning to play the cello",
    "a voyage around a cape", "growing vegetables on a balcony", "why the sky is blue", "a city that forgot its name",
    "repairing an old bicycle", "how rivers shape valleys", "a detective who cannot read", "planning a small library",
    "the life of a beekeeper", "how computers add numbers", "a village under a volcano", "training for a long run",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str

    def grade(self, reply: str) -> None:
        """Nothing is right or wrong here."""

    def proved(self, trace: str) -> None:
        """Nothing is proved either."""


def make_prompt(rng: random.Random) -> Prompt:
    return Prompt(f"Write {rng.choice(KINDS)} about {rng.choice(TOPICS)}. Go into as much detail as you can.")
