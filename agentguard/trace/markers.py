"""The tokens between which a model thinks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Markers:
    """A model family's start and end markers as text."""

    start: str = "<think>"
    end: str = "</think>"
