"""What type checkers see of `agentguard`: the names of the SDK, which the module itself imports lazily."""

from agentguard.sdk import *  # noqa: F403

__version__: str
