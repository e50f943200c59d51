"""The hook for a LiteLLM proxy: who asks, and how much may be thought, in the form the guard's gateway reads.

One line in the proxy's YAML loads it: `litellm_settings: {callbacks: agentguard.integrations.litellm.hook}`. LiteLLM rounds
`thinking.budget_tokens` to one of four efforts and drops what it does not know on `/v1/responses`; what is put into `extra_body`
reaches the server on all three protocols (litellm.md, section 2.2). Everything else happens in the gateway, below translation. Only
for models that LiteLLM serves from vLLM (`hosted_vllm/…`): other providers would refuse the fields, and nobody's ids are theirs.
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
_CALLS = ("completion", "acompletion", "anthropic_messages", "aanthropic_messages", "responses", "aresponses")
_PROVIDER = "hosted_vllm/"
_RETRY = ("retry-after", "x-should-retry")
_MESSAGE = re.compile(r'"message":"((?:[^"\\]|\\.)*)"')


class AgentGuardHook(CustomLogger):  # type: ignore[misc]  # LiteLLM is not installed where this is type-checked
    """A leaf class: LiteLLM ignores a hook that is inherited (it looks into `vars(cls)`)."""

    async def async_pre_call_hook(self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str) -> dict[str, Any]:
        if call_type not in _CALLS or not _guarded(str(data.get("model") or "")):
            return data
        request = data.get("proxy_server_request") or {}
        headers = {str(k).lower(): v for k, v in (request.get("headers") or {}).items() if isinstance(v, str)}
        headers.pop(CALLER, None)  # not for the client to say: it would name another caller's session
        for carried in ("headers", "extra_headers"):
            if isinstance(data.get(carried), dict):
                data[carried] = {k: v for k, v in data[carried].items() if str(k).lower() not in _OURS}
        # LiteLLM passes a key on as its hash; it is hashed again, so that it is none that LiteLLM's database knows
        # where callers come without a key (JWT), their user, team and end user tell them apart
        who = [str(getattr(user_api_key_dict, name, None) or "") for name in ("api_key", "user_id", "team_id", "end_user_id")]
        caller = digest(*(f"{place}:{part}" for place, part in enumerate(who) if part))
        try:
            session, agent = session_of(headers, data)
        except ConfigError as error:
            from fastapi import HTTPException

            raise HTTPException(400, str(error)) from None
        session = session or guess(data, caller)
        marked = {CALLER: caller, AGENT: agent, SESSION: session, "x-session-id": session}
        data["extra_headers"] = {**(data.get("extra_headers") or {}), **{k: v for k, v in marked.items() if v}}
        added: dict[str, Any] = {}
        name, budget = find_budget(data)
        if name:
            added["thinking_token_budget"] = budget
        effort = asked_effort(data)
        if effort is not None:
            added["reasoning_effort"] = effort
        own = data.get("extra_body")
        if added and (own is None or isinstance(own, dict)):  # what is neither, LiteLLM refuses in its own words
            data["extra_body"] = {**added, **(own or {})}
        return data

    async def async_post_call_failure_hook(
        self, request_data: Any, original_exception: Exception, user_api_key_dict: Any, traceback_str: str | None = None
    ) -> Any:
        """A stopped session and an engine that is coming back: the gateway's own words and its retry-after, which LiteLLM would
        rename. Never for a stream that has begun: LiteLLM breaks it off when it gets an exception there."""
        if not _guarded(str((request_data or {}).get("model") or "")):
            return None
        headers = getattr(original_exception, "litellm_response_headers", None) or {}
        told = {name: headers[name] for name in _RETRY if headers.get(name)}
        status = getattr(original_exception, "status_code", None)
        if status not in (429, 503) or "retry-after" not in told:
            return None
        from fastapi import HTTPException

        message = _MESSAGE.search(str(original_exception))
        return HTTPException(status, json.loads(f'"{message[1]}"') if message else str(original_exception), told)


def _guarded(model: str) -> bool:
    """Does every deployment behind this name come from vLLM? LiteLLM chooses among them later."""
    if model.startswith(_PROVIDER):
        return True
    from litellm.proxy.proxy_server import llm_router

    found = llm_router.get_model_list(model_name=model) if llm_router is not None else None
    return bool(found) and all(str(d["litellm_params"].get("model") or "").startswith(_PROVIDER) for d in found or ())


hook = AgentGuardHook()
