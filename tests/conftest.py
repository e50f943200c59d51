"""Shared fixtures. Engine fixtures start real vLLM processes and are shared by the whole session (about 40 s each here)."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator

# before anything imports Triton, whose functions are bound to the interpreter when they are defined; vLLM's CPU build leaves Triton
# off. Where there is a GPU the engines of the tests need the compiler, and benchmarks/gpu_check.sh does what test_kernels.py does
if shutil.which("nvidia-smi") is None and not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):  # noqa: PTH110
    os.environ.setdefault("TRITON_INTERPRET", "1")

import httpcore2  # noqa: F401  # httpx2 imports it with its first client, which would read files on the loop
import pytest
import pytest_asyncio
from blockbuster import BlockBuster, blockbuster_ctx

from agentguard.events import Event
from agentguard.gateway.server import Stack, serve_stack
from agentguard.policy import Policy
from agentguard.reference import reference_model
from agentguard.telemetry.hub import Hub


def pytest_configure(config: pytest.Config) -> None:
    """Gateways of tests leave no files in the state of whoever runs them."""
    state = tempfile.TemporaryDirectory(prefix="agentguard-tests-")
    os.environ["XDG_STATE_HOME"] = state.name
    config.add_cleanup(state.cleanup)


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[BlockBuster | None]:
    """A blocking call of ours on a running event loop fails the test; a test without a loop needs no watch (20 ms each)."""
    if not inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        yield None
        return
    with blockbuster_ctx("agentguard") as blockbuster:
        yield blockbuster


class RunningStack:
    """The session's engine and gateway, with every event since the start."""

    def __init__(self, stack: Stack, events: list[Event]) -> None:
        self.stack = stack
        self.events = events


@pytest.fixture(scope="session")
def reference_policy() -> Policy:
    return Policy(model=str(reference_model("target")), draft=str(reference_model("draft")))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running(reference_policy: Policy) -> AsyncIterator[RunningStack]:
    events: list[Event] = []
    hub = Hub()
    with hub.sink(events.append):
        async with serve_stack(reference_policy, hub=hub) as stack:
            yield RunningStack(stack, events)
