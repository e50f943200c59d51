"""What type checkers see of `agentguard`: the names of the SDK, which the module itself imports lazily."""

from agentguard.sdk import (
    ActionRefusedError as ActionRefusedError,
)
from agentguard.sdk import (
    AgentGuardError as AgentGuardError,
)
from agentguard.sdk import (
    AnswerDelta as AnswerDelta,
)
from agentguard.sdk import (
    Budget as Budget,
)
from agentguard.sdk import (
    CallNext as CallNext,
)
from agentguard.sdk import (
    CompactionAdvised as CompactionAdvised,
)
from agentguard.sdk import (
    ConfigError as ConfigError,
)
from agentguard.sdk import (
    Connection as Connection,
)
from agentguard.sdk import (
    ContextLengthError as ContextLengthError,
)
from agentguard.sdk import (
    Economics as Economics,
)
from agentguard.sdk import (
    EngineDiedError as EngineDiedError,
)
from agentguard.sdk import (
    EngineError as EngineError,
)
from agentguard.sdk import (
    EngineRequestError as EngineRequestError,
)
from agentguard.sdk import (
    EngineStartError as EngineStartError,
)
from agentguard.sdk import (
    Events as Events,
)
from agentguard.sdk import (
    Middleware as Middleware,
)
from agentguard.sdk import (
    Policy as Policy,
)
from agentguard.sdk import (
    Retried as Retried,
)
from agentguard.sdk import (
    RetryBusy as RetryBusy,
)
from agentguard.sdk import (
    RetryCuts as RetryCuts,
)
from agentguard.sdk import (
    RunningBudget as RunningBudget,
)
from agentguard.sdk import (
    Session as Session,
)
from agentguard.sdk import (
    SessionAlarm as SessionAlarm,
)
from agentguard.sdk import (
    SessionBusyError as SessionBusyError,
)
from agentguard.sdk import (
    SessionLimitError as SessionLimitError,
)
from agentguard.sdk import (
    SessionState as SessionState,
)
from agentguard.sdk import (
    StepEvent as StepEvent,
)
from agentguard.sdk import (
    StepFinished as StepFinished,
)
from agentguard.sdk import (
    StepRequest as StepRequest,
)
from agentguard.sdk import (
    StepStarted as StepStarted,
)
from agentguard.sdk import (
    StepStream as StepStream,
)
from agentguard.sdk import (
    StepSummary as StepSummary,
)
from agentguard.sdk import (
    StepTimeoutError as StepTimeoutError,
)
from agentguard.sdk import (
    StoreError as StoreError,
)
from agentguard.sdk import (
    StreamClosedError as StreamClosedError,
)
from agentguard.sdk import (
    ThinkDelta as ThinkDelta,
)
from agentguard.sdk import (
    ToolArgumentsError as ToolArgumentsError,
)
from agentguard.sdk import (
    ToolCall as ToolCall,
)
from agentguard.sdk import (
    TraceClosed as TraceClosed,
)
from agentguard.sdk import (
    connect as connect,
)
from agentguard.sdk import (
    wrap as wrap,
)

__version__: str
