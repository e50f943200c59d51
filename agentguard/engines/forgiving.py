"""Asking again without a field of the guard's own that a server refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from agentguard.engines.base import Stream
from agentguard.engines.facts import Facts
from agentguard.errors import EngineRequestError

logger = logging.getLogger(__name__)


async def forgiving(facts: Facts, name: str, send: Callable[[dict[str, Any]], Stream], request: Mapping[str, Any]) -> Stream:
    """The chunks of ``send(request)``; fields of the guard's own that engine ``name`` refuses are left out, and it is remembered
    once that has worked. Raises EngineRequestError for any other refusal."""
    tried: list[str] = []
    while True:
        sent = {k: v for k, v in request.items() if k not in facts.dropped and k not in tried}
        try:
            async with aclosing(send(sent)) as chunks:
                async for chunk in chunks:
                    if tried:
                        facts.learn_refused(tried)
                        logger.warning("fields_refused", extra={"engine": name, "fields": tried})
                        tried = []
                    yield chunk
            return
        except EngineRequestError as error:
            # a refusal comes before the first chunk; one retry for each field of ours it names
            refused = facts.refused(sent, str(error)) if error.status == 400 else []
            if not refused:
                raise
            tried += refused
