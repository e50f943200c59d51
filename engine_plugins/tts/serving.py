"""TTS in the worker: which weights the served draft has, and when they change. Only between steps, and only by collective RPC or by
what every rank sees in the same step (a request begins).
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentguard.errors import PluginError
from agentguard.events import DraftUpdated, TtsChanged, TtsState
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts.slots import Slots

if TYPE_CHECKING:
    from torch import Tensor

    from engine_plugins.tts.capture import Capture, Seen

logger = logging.getLogger("vllm.agentguard")
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
START = 0  # slot of the weights the draft was trained to
Span = tuple[str, Any, int, int]
"""A request, the runner's record of it, and its rows start … stop."""


class Serving:
    """The state machine of the served draft's weights.

    epoch counts the requests at which the draft stood at its start weights; a publish for another epoch is refused. version is that
    of the weights in use, 0 for the start weights; published: others were ever in use. capturing says whether the trainer is sent
    frames. fixed: tensors of a head that are the target's own, which a trainer must leave out. Nothing in here ends a step of the
    engine: what fails switches TTS off, with an event."""

    def __init__(
        self, worker: Any, settings: TtsSettings, capture: Capture | None, emit: Callable[[Any], None], engine: str,
        fixed: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._worker, self._settings, self._capture, self._emit, self._engine = worker, settings, capture, emit, engine
        self._fixed = tuple(fixed)
        self.epoch = 0
        self.version = 0
        self.published = False
        self._path = ""
        self._live = False  # a trainer is attached and nobody has paused it
        self.failed = ""  # what went wrong in a step, until the next trainer
        self._stopped: frozenset[str] = frozenset()  # requests that are not learned from any more
        self._running: frozenset[str] = frozenset()
        self._gaps: deque[float] = deque(maxlen=64)
        self._last = 0.0
        self._quiet_reload = _Quiet()
        logging.getLogger(RELOAD_LOGGER).addFilter(self._quiet_reload)

    @property
    def capturing(self) -> bool:
        return self._live and self._capture is not None and not self._stopped

    @property
    def round_ms(self) -> float:
        return statistics.median(self._gaps) if self._gaps else 0.0

    def before_step(self, scheduled: Any, known: set[str]) -> None:
        """Called before each step on every rank with what the scheduler says and the requests known so far. A request that begins
        alone starts from the weights the draft was trained to; requests a trainer has given up on end that when they end."""
        going_on = known - set(scheduled.finished_req_ids)
        begun = {new.req_id for new in scheduled.scheduled_new_reqs} - going_on  # V2 also calls a preempted one that comes back new
        self._running = frozenset(going_on | begun)
        alone = self._settings.reset == "request" and begun and not going_on
        if alone or (self._stopped and not self._stopped & going_on):
            self._stopped = frozenset()
            self.epoch += 1
            self._last = 0.0
            if self.version:
                self.guarded(self._to_the_start, "going back to the start weights")

    @property
    def fixed(self) -> list[str]:
        return list(self._fixed)

    def attach(self, path: str, settings: dict[str, Any]) -> dict[str, Any]:
        """A trainer is ready. Loads its start weights, which are the ones in use, so what cannot be loaded shows now."""
        self._settings = TtsSettings.parse(settings)
        theirs = {entry.name for entry in Slots.open(Path(path)).entries} & set(self._fixed) if self._fixed else set()
        if theirs:  # loading them would change the target
            raise PluginError(
                f"the trainer would publish {', '.join(sorted(theirs))}, which belong to the target; attach another one"
            )
        if path != self._path:
            self._path = ""
            self._worker.init_weight_transfer_engine({"path": path})
        self._load(START)
        self._path, self.version, self._live, self._stopped, self.failed = path, 0, True, frozenset(), ""
        self.epoch += 1
        if self._capture is not None:
            self._capture.forget(self._settings.window, self._settings.top_k)
        on_cpu = self._worker.device.type == "cpu"
        return {"epoch": self.epoch, "cpus": sorted(os.sched_getaffinity(0)) if on_cpu else []}

    def publish(self, info: dict[str, Any]) -> dict[str, Any]:
        """Load what the trainer has written. info: version, epoch, slot, action, reason and the facts of the update."""
        why = self._refusal(info)
        if why:
            return {"applied": False, "ms": 0.0, "reason": why}
        self.published = self.published or info["slot"] != START
        ms = self._load(info["slot"])
        self.version = info["version"] if info["slot"] != START else 0
        self._last = 0.0
        if info["action"] == "stop":
            self._stopped = self._running or frozenset({""})
        if info["action"] != "go_on":
            self._changed("stopped" if info["action"] == "stop" else "rolled_back", info["reason"])
        else:
            facts = {f: info[f] for f in ("loss", "train_ms", "rows", "rounds", "live", "frozen", "gain", "break_even")}
            self._emit(
                DraftUpdated(t=time.time(), engine=self._engine, version=self.version, epoch=self.epoch, publish_ms=ms, **facts)
            )
        return {"applied": True, "ms": ms, "reason": ""}

    def detach(self, state: TtsState, reason: str) -> dict[str, Any]:
        """No trainer any more, or none wanted: back to the start weights, and no frames."""
        self._live = False
        if self._capture is not None:
            self._capture.forget(self._settings.window, self._settings.top_k)
        if self.version and self._path:
            self._to_the_start()
        self._changed(state, reason)
        return {"version": self.version}

    def note(self, state: TtsState, reason: str) -> None:
        self._changed(state, reason)

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens of a window, and tokens of a row that are sent (0: all)."""
        assert self._capture is not None
        return self._capture.window, self._capture.width

    def chosen(self, seen: Sequence[Seen]) -> list[Seen]:
        """See `Capture.chosen`; none where that failed."""
        assert self._capture is not None
        capture = self._capture
        return self.guarded(lambda: capture.chosen(seen), "choosing requests to learn from") or []

    def before(self, seen: Sequence[Seen], logits: Tensor, q: Tensor | None, drafts: Tensor, forced: Tensor) -> Any:
        """Of a verification on runner V1: what `Capture.before` takes, and the time since the last one. None where that failed."""
        return self.take(lambda capture, facts: capture.before(seen, logits, q, drafts, forced, **facts))

    def take(self, work: Callable[[Capture, dict[str, Any]], Any]) -> Any:
        """Of a verification: what ``work`` makes of the capture and of the facts `Capture.taken` wants by name. None where that
        failed."""
        assert self._capture is not None
        capture, now = self._capture, time.perf_counter()
        if self._last:
            self._gaps.append((now - self._last) * 1000)
        self._last = now
        facts = {"epoch": self.epoch, "version": self.version, "round_ms": self.round_ms}
        return self.guarded(lambda: work(capture, facts), "capturing a verification")

    def hidden(self, spans: Callable[[], Iterable[Span]], positions: Tensor, states: Tensor) -> None:
        """Of a step: the hidden states a head drafts from. positions: [n]; states: [n, W]; spans: whose rows they are."""
        assert self._capture is not None
        capture = self._capture

        def take() -> None:
            for request, state, start, stop in spans():
                if stop > start and capture.wants(request):
                    capture.hidden(request, state, positions[start:stop], states[start:stop])

        self.guarded(take, "capturing hidden states")

    def after(self, step: Any, out: Tensor) -> None:
        assert self._capture is not None
        capture = self._capture
        self.guarded(lambda: capture.after(step, out), "sending a verification")

    def _refusal(self, info: dict[str, Any]) -> str:
        if not self._live or not self._path:
            return "no trainer is attached"
        if info["epoch"] != self.epoch:
            return f"made for epoch {info['epoch']}, and a new request began epoch {self.epoch}"
        return ""

    def _to_the_start(self) -> None:
        self._load(START)
        self.version = 0

    def _load(self, slot: int) -> float:
        """Load a slot through vLLM's draft weight update session; milliseconds. A failure loads the start weights, if they can be,
        and is raised; `version` then says whether they are in use."""
        started = time.perf_counter()
        try:
            self._session(slot)
        except Exception:
            self._live = False
            self._worker._weight_update_active = False  # vLLM leaves it on where the end of a session fails
            self._worker.weight_transfer_engine.reset_weight_update_target()
            if slot != START and self._path:
                self._session(START)
                self.version = 0
            raise
        return (time.perf_counter() - started) * 1000

    def _session(self, slot: int) -> None:
        self._quiet_reload.on = True
        try:
            self._worker.start_draft_weight_update()
            self._worker.update_weights({"slot": slot})
            self._worker.finish_weight_update()
        finally:
            self._quiet_reload.on = False

    def guarded(self, work: Callable[[], Any], what: str) -> Any:
        """Inside a step of the engine: a failure of TTS is TTS's own. None where ``work`` failed."""
        try:
            return work()
        except Exception as error:
            logger.exception("agentguard: tts failed in a step")
            self._live = False
            self.failed = f"{what} failed in the worker: {error!r}"
            self._changed("off", self.failed)
            return None

    def _changed(self, state: TtsState, reason: str) -> None:
        logger.info("agentguard: tts %s%s", state, f": {reason}" if reason else "")
        self._emit(
            TtsChanged(t=time.time(), engine=self._engine, state=state, reason=reason, epoch=self.epoch, version=self.version)
        )


class _Quiet(logging.Filter):
    """vLLM warns for every layer that got no weights; under a narrow scope that is most of them, several times a second.

    A filter, as changing the logger's level clears the caches of all loggers (1.6 ms of a publish, measured).
    """

    on = False

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.on or record.levelno >= logging.ERROR
