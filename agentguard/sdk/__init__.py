"""The async SDK: guarded steps from Python (docs/sdk.md). Its names are also those of `agentguard` itself, imported when they
are used."""

from __future__ import annotations

from agentguard.errors import (
    ActionRefusedError,
    AgentGuardError,
    ConfigError,
    ContextLengthError,
    EngineDiedError,
    EngineError,
    EngineRequestError,
    EngineStartError,
    SessionBusyError,
    SessionLimitError,
    StepTimeoutError,
    StreamClosedError,
)
from agentguard.events import CompactionAdvised, SessionAlarm, SessionState, StepFinished, StepStarted, TraceClosed
from agentguard.policy import Policy
from agentguard.sdk.adapters import wrap
from agentguard.sdk.budget import Budget, RunningBudget
from agentguard.sdk.connection import Connection, connect
from agentguard.sdk.events import (
    AnswerDelta,
    Economics,
    Retried,
    StepEvent,
    StepSummary,
    ThinkDelta,
    ToolArgumentsError,
    ToolCall,
)
from agentguard.sdk.middleware import CallNext, Events, Middleware
from agentguard.sdk.request import StepRequest
from agentguard.sdk.retries import RetryBusy, RetryCuts
from agentguard.sdk.session import Session
from agentguard.sdk.stream import StepStream
from agentguard.store import StoreError

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
    "connect",
    "wrap",
]
