"""What a session has left."""

from __future__ import annotations

from dataclasses import dataclass

from agentguard.events import SessionState


@dataclass(frozen=True, slots=True)
class RunningBudget:
    """A step that runs. Tokens: ``think_tokens`` and ``answer_tokens`` so far, ``think_cap`` where its trace will be closed,
    ``budget`` what the step may generate in all, ``prompt_tokens`` what it was asked with. ``request`` is its id."""

    request: str
    step: int
    prompt_tokens: int
    budget: int
    think_cap: int
    think_tokens: int = 0
    answer_tokens: int = 0

    @property
    def think_left(self) -> int:
        """Tokens the trace may still grow by."""
        return max(0, self.think_cap - self.think_tokens)


@dataclass(frozen=True, slots=True)
class Budget:
    """A session at this moment. Read anew with every access to `Session.budget`; this object does not change.

    ``state`` is its account of finished steps, ``running`` the steps that run through this session object. ``window`` is the
    context window in tokens (None where a gateway does not tell it) and ``context_tokens`` the latest prompt's length.
    ``complete``: False while a step was broken off whose accounts did not arrive; `Session.refresh` asks for them.
    """

    state: SessionState
    running: tuple[RunningBudget, ...]
    window: int | None
    context_tokens: int
    complete: bool

    @property
    def steps(self) -> int:
        """Model calls of the session, running ones included."""
        return self.state.steps

    @property
    def tokens(self) -> int:
        """Generated tokens, those of running steps included."""
        return self.state.tokens + sum(step.think_tokens + step.answer_tokens for step in self.running)

    @property
    def think_tokens(self) -> int:
        """Tokens of traces, those of running steps included."""
        return self.state.think_tokens + sum(step.think_tokens for step in self.running)

    @property
    def steps_left(self) -> int | None:
        """Steps until the session is stopped; None for no limit."""
        return None if self.state.step_limit is None else max(0, self.state.step_limit - self.steps)

    @property
    def tokens_left(self) -> int | None:
        """Tokens until the session is stopped; None for no limit."""
        return None if self.state.token_limit is None else max(0, self.state.token_limit - self.tokens - self.state.lost)

    @property
    def fill(self) -> float | None:
        """Share of the context window the latest prompt filled; None where the window is unknown."""
        return None if not self.window else self.context_tokens / self.window
