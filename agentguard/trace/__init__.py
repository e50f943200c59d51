"""The think block: its markers, its split from the answer, and when it is closed."""

from agentguard.trace.markers import Markers
from agentguard.trace.splitter import Splitter

__all__ = ["Markers", "Splitter"]
