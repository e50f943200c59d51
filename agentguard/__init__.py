"""agentguard makes self-hosted reasoning models finish. See README.md and docs/.

The names of the SDK (agentguard.sdk) are here too, and are imported when they are used: `import agentguard` alone brings
nothing but this file.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = [
    "ActionRefusedError",
    "AgentGuardError",
    "AnswerDelta",
    "Budget",
    "CallNext",
    "CompactionAdvised",
    "ConfigError",
    "Connection",
    "ContextLengthError",
    "Economics",
    "EngineDiedError",
    "EngineError",
    "EngineRequestError",
    "EngineStartError",
    "Events",
    "Middleware",
    "Policy",
    "Retried",
    "RetryBusy",
    "RetryCuts",
    "RunningBudget",
    "Session",
    "SessionAlarm",
    "SessionBusyError",
    "SessionLimitError",
    "SessionState",
    "StepEvent",
    "StepFinished",
    "StepRequest",
    "StepStarted",
    "StepStream",
    "StepSummary",
    "StepTimeoutError",
    "StoreError",
    "StreamClosedError",
    "ThinkDelta",
    "ToolArgumentsError",
    "ToolCall",
    "TraceClosed",
    "__version__",
    "connect",
    "wrap",
]


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'agentguard' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module("agentguard.sdk"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
