"""Fuzzers: what strangers can send, made at random, against what must hold for all of it. `python -m benchmarks.fuzz` runs them
long, test_fuzz.py a share of them in CI, and shows that each finds a bug that is put into a copy of its target."""

from tests.fuzz import streams  # noqa: F401  # targets of its own
