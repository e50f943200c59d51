"""The monitor as the screen uses it: open it, ask for snapshots, act."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

from agentguard.monitor.snapshot import Snapshot


class Monitor(Protocol):
    """What `monitor.live.open_monitor(options)` (an async context manager) yields.

    ``snapshot`` is synchronous, costs a few ms and never raises; reading goes on in tasks the monitor owns. Actions need a gateway
    and raise AgentGuardError with the reason, ActionRefusedError under --readonly; each returns a sentence that says what was done.
    """

    def snapshot(self) -> Snapshot: ...

    async def wait(self, samples: int) -> Snapshot:
        """The snapshot once so many samples were taken of every source that answers, or of none in time."""
        ...

    def start_recording(self, path: Path) -> None: ...

    async def stop_recording(self) -> None: ...

    def set_interval(self, seconds: float) -> None: ...

    # replay and demo; no-ops on live sources
    async def seek_to(self, t: float) -> None:
        """Go to a time, in a thread, as it may take seconds. Until it is there, snapshots are the last one, with the asked time as
        ``at_t`` of their playback; another call takes over, and then both return when the latest time is reached."""
        ...

    def set_speed(self, speed: float) -> None: ...

    def set_paused(self, paused: bool) -> None: ...

    # an operator's actions; keys are those of the snapshot's rows
    async def close_trace(self, session: str) -> str: ...

    async def set_limit(self, session: str, meter: Literal["steps", "tokens", "no_progress"], limit: int) -> str: ...

    async def pin(self, engine: str, workload: str, arm: str, rule: str | None) -> str:
        """Hold an arm of a class ("" for all classes) on or at strict: ``rule`` is the arm itself or "strict"; None lets the guard
        decide again."""
        ...

    async def set_tts(self, engine: str, enabled: bool) -> str: ...
