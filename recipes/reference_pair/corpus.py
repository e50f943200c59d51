"""Training text for the reference pair: conversations over the `chain` suite, as token ids with a loss weight per token.

What a row contains, and why:

- one to six turns; the history keeps answers and drops think blocks, as the chat template does at inference;
- loss on the last turn's trace and answer only: an answer without its trace cannot be predicted;
- 15 % of the traces are closed at a random token and answered with the best value written so far, so that a forced close is in
  distribution. The close itself carries no loss: the model must not learn to close at random;
- verdicts (`ok`, `no`) and the choice after a pass (another one, or the answer) carry three times the loss. The optimum of a
  cross-entropy does not depend on positive weights, but these two are what the model learns last.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from agentguard.study.suites import chain

CLOSED_SHARE = 0.15
HARD_WEIGHT = 3.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the conversations of one training stage look like.

    low, high: variables per chain; long: share of `chain-long` problems; turns: the most turns of a conversation;
    error: share of wrong lines in a trace (a curriculum starts high, so that `no` is frequent enough to be learnt).
    """

    low: int = 2
    high: int = 8
    long: float = 0.0
    turns: int = 6
    error: float = 0.06


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation: ids and, for each id, the weight of the loss for predicting it (0 = none)."""

    ids: list[int]
    weights: list[float]


class Corpus:
    """An endless, seeded stream of conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._rng = random.Random(f"corpus/{seed}")
        (self._close,) = self._encode("</think>")
        self._hard = {self._close, *self._encode(" ok no"), *self._encode("check")}

    def conversation(self, mix: Mixture) -> Row:
        rng = self._rng
        prompt: list[int] = []
        if rng.random() < 0.05:
            prompt += self._encode(f"<|im_start|>system\n{self._noise()}<|im_end|>\n")
        history = rng.randint(1, mix.turns - 1) if mix.turns > 1 and rng.random() < 0.2 else 0
        previous: int | None = None
        for _ in range(history):
            past = chain.make_problem(rng, rng.randint(2, 8), previous=self._carried(previous))
            # a history may hold a wrong answer; the next step builds on what was said
            previous = past.answer if rng.random() < 0.9 else rng.randrange(chain.MODULUS)
            prompt += self._encode(f"<|im_start|>user\n{past.text}<|im_end|>\n<|im_start|>assistant\n{previous}<|im_end|>\n")
        problem = self._problem(mix, self._carried(previous))
        prompt += self._encode(f"<|im_start|>user\n{problem.text}<|im_end|>\n<|im_start|>assistant\n<think>\n")
        while not (trace := chain.make_trace(rng, problem, error=mix.error)).clean:
            pass
        thought, answer, closed = self._encode(trace.text + "\n"), trace.answer, False
        if rng.random() < CLOSED_SHARE:
            closed = True
            thought = thought[: rng.randint(1, len(thought))]
            answer = chain.best_so_far(problem, self._tokenizer.decode(thought))
        reply = self._encode(f"\n{answer}<|im_end|>\n")
        ids = [*prompt, *thought, self._close, *reply]
        weights = [0.0] * len(prompt) + [self._weight(i) for i in thought]
        weights += [0.0 if closed else HARD_WEIGHT, *([1.0] * (len(reply) - 1)), 0.0]
        return Row(ids, weights)

    def rows(self, mix: Mixture, length: int) -> Iterator[Row]:
        """Rows of ``length + 1`` ids: conversations one after another, the last one cut at the end."""
        while True:
            ids: list[int] = []
            weights: list[float] = []
            while len(ids) <= length:
                row = self.conversation(mix)
                ids += row.ids
                weights += row.weights
            yield Row(ids[: length + 1], weights[: length + 1])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _carried(self, previous: int | None) -> int | None:
        return previous if previous is not None and self._rng.random() < 0.8 else None

    def _problem(self, mix: Mixture, previous: int | None) -> chain.Problem:
        rng = self._rng
        if rng.random() < mix.long:
            variables = rng.randint(8, 16)
            return chain.make_problem(rng, variables, previous=previous, passes=rng.randint(2, 2400 // (10 * variables)))
        return chain.make_problem(rng, rng.randint(mix.low, mix.high), previous=previous)

    def _weight(self, token: int) -> float:
        return HARD_WEIGHT if token in self._hard else 1.0

    def _noise(self) -> str:
        rng = self._rng
        alphabet = "".join(map(chr, range(32, 127))) + "äßéø✓漢\t"
        return "".join(rng.choice(alphabet) for _ in range(rng.randint(8, 48)))
