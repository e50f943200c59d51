"""The vLLM plugin. `register` is the `vllm.general_plugins` entry point and runs once in every vLLM process.

Light on purpose: vLLM swallows import errors of a plugin but not exceptions of the function, so everything that can fail is in the
function or in the worker class.
"""

from __future__ import annotations

import logging
import os

registered = False


def register() -> None:
    """Mark the plugin as present in this process and say why it is off, if it is.

    A vLLM that was not started with our worker class is none of our business, so an unsupported version is only logged here; the
    worker class refuses it. With AG_STRICT=1 it is refused here.
    """
    global registered
    from agentguard.errors import PluginError
    from engine_plugins.vllm import compat

    off = [f for f in compat.gate() if not f.on]
    if off and os.environ.get(compat.STRICT_ENV) == "1":
        raise PluginError(off[0].reason)
    for feature in off:
        logging.getLogger("vllm.agentguard").warning("agentguard: %s is off: %s", feature.name, feature.reason)
    registered = True
