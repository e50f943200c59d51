"""The hook for a LiteLLM proxy: who asks, and how much may be thought, in the form the guard's gateway reads.

One line in the proxy's YAML loads it: `litellm_settings: {callbacks: agentguard.integrations.litellm.hook}`. LiteLLM rounds
`thinking.budget_tokens` to one of four efforts and drops what it does not know on `/v1/responses`; what is put into `extra_body`
reaches the server on all three protocols (litellm.md, section 2.2). Everything else happens in the gateway, below translation.
"""

from __future__ import annotations

import json
import re
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from agentguard.errors import ConfigError
from agentguard.identity import AGENT, CALLER, SESSION, digest, guess, session_of
from agentguard.think_budget import asked_effort, find_budget

_OURS = (SESSION, CALLER, AGENT)
_RETRY = ("retry-after", "x-should-retry")
_MESSAGE = re.compile(r'"message":"((?:[^"\\]|\\.)*)"')


class AgentGuardHook(CustomLogger):  # type: ignore[misc]  # LiteLLM is not installed where this is type-checked
    """A leaf class: LiteLLM ignores a hook that is inherited (it looks into `vars(cls)`)."""

    async def async_pre_call_hook(self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str) -> dict[str, Any]:
        request = data.get("proxy_server_request") or {}
        headers = {str(k).lower(): v for k, v in (request.get("headers") or {}).items() if isinstance(v, str)}
        headers.pop(CALLER, None)  # not for the client to say: it would name another caller's session
        for carried in ("headers", "extra_headers"):
            if isinstance(data.get(carried), dict):
                data[carried] = {k: v for k, v in data[carried].items() if str(k).lower() not in _OURS}
        # LiteLLM passes a key on as its hash; it is hashed again, so that it is none that LiteLLM's database knows
        caller = digest(str(getattr(user_api_key_dict, "api_key", None) or ""))
        try:
            session, agent = session_of(headers, data)
        except ConfigError as error:
            from fastapi import HTTPException

            raise HTTPException(400, str(error)) from None
        session = session or guess(data, caller)
        marked = {CALLER: caller, AGENT: agent, SESSION: session, "x-session-id": session}
        data["extra_headers"] = {**(data.get("extra_headers") or {}), **{k: v for k, v in marked.items() if v}}
        body = data["extra_body"] = dict(data.get("extra_body") or {})
        name, budget = find_budget(data)
        if name:
            body.setdefault("thinking_token_budget", budget)
        effort = asked_effort(data)
        if effort is not None:
            body.setdefault("reasoning_effort", effort)
        return data

    async def async_post_call_failure_hook(
        self, request_data: Any, original_exception: Exception, user_api_key_dict: Any, traceback_str: str | None = None
    ) -> Any:
        """A stopped session and an engine that is coming back: the gateway's own words and its retry-after, which LiteLLM would
        rename. Never for a stream that has begun: LiteLLM breaks it off when it gets an exception there."""
        headers = getattr(original_exception, "litellm_response_headers", None) or {}
        told = {name: headers[name] for name in _RETRY if headers.get(name)}
        status = getattr(original_exception, "status_code", None)
        if status not in (429, 503) or "retry-after" not in told:
            return None
        from fastapi import HTTPException

        message = _MESSAGE.search(str(original_exception))
        return HTTPException(status, json.loads(f'"{message[1]}"') if message else str(original_exception), told)


hook = AgentGuardHook()
