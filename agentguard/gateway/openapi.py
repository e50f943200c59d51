"""The gateway's routes as an OpenAPI 3.1 document, from the very models that read the requests.

`python -m agentguard.gateway.openapi` writes it; docs/openapi.json is a copy that a test holds to the code, and the fuzzer of the
routes makes its requests from it.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from agentguard import __version__
from agentguard.gateway.app import CloseTrace, PinArm, RaiseLimit, SetTts
from agentguard.gateway.auth import OPEN, ROUTES
from agentguard.gateway.watch import LONGEST_S, SHORTEST_S
from agentguard.requests import ChatRequest

_GETS: dict[str, tuple[str, str]] = {
    "/v1/models": ("The model that is served, and its context window.", "application/json"),
    "/agentguard/events": ("Every event from now on, without end.", "text/event-stream"),
    "/agentguard/sessions": ("Sessions and what they used.", "application/json"),
    "/agentguard/tails": ("The latest words of running traces, where the recipe gives content.", "application/json"),
    "/agentguard/tts": ("How the draft's learning stands.", "application/json"),
    "/guard/v1/economics": ("Arms, ratios and verdicts.", "application/json"),
    "/guard/v1/watch": ("The state at intervals, without end.", "text/event-stream"),
    "/metrics": ("Economics for Prometheus.", "text/plain"),
    "/health": ("The gateway lives.", "application/json"),
}
_POSTS: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/chat/completions": ("One guarded step; a stream of chunks with 'stream': true.", ChatRequest),
    "/agentguard/close": ("Close the trace of a request, or of all of a session.", CloseTrace),
    "/agentguard/sessions/limit": ("Raise a session's limit.", RaiseLimit),
    "/agentguard/pin": ("Hold an arm at a rule, or leave it to the guard again.", PinArm),
    "/agentguard/tts": ("Pause the draft's learning, let it go on, or change its settings.", SetTts),
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string", "description": "Names the field, the value and the remedy."},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "code": {"type": ["integer", "string"]},
                "param": {"type": "string", "description": "The field or header; of every refusal that is the request's fault."},
            },
        }
    },
}


def document() -> dict[str, Any]:
    """The whole document."""
    models: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for path, (summary, kind) in _GETS.items():
        paths.setdefault(path, {})["get"] = _operation(path, summary, kind)
    interval = {"type": "number", "minimum": SHORTEST_S, "maximum": LONGEST_S, "default": 1}
    asked = {"name": "interval", "in": "query", "description": "Seconds between frames.", "schema": interval}
    paths["/guard/v1/watch"]["get"]["parameters"] = [asked]
    for path, (summary, model) in _POSTS.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        models |= schema.pop("$defs", {})
        models[model.__name__] = schema
        operation = _operation(path, summary, "application/json")
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        operation["requestBody"] = {"required": True, "content": content}
        if path == "/v1/chat/completions":
            operation["responses"]["200"]["content"]["text/event-stream"] = {}
            header = {"type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[!-~]+$"}
            about = "The session; without one it is guessed from how the prompt begins."
            operation["parameters"] = [{"name": "x-session-id", "in": "header", "description": about, "schema": header}]
        paths.setdefault(path, {})["post"] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentguard gateway", "version": __version__},
        "paths": paths,
        "components": {"schemas": models, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(path: str, summary: str, kind: str) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    scope = ROUTES.get(path)
    return {
        "summary": summary,
        "description": f"Scope: {scope}." if scope else "Needs no key.",
        "security": [] if path in OPEN else [{"key": []}],
        "responses": {
            "200": {"description": "Done.", "content": {kind: {}}},
            "4XX": {"description": "The request's fault.", **error},
            "5XX": {"description": "The gateway's or the engine's.", **error},
        },
    }


if __name__ == "__main__":
    print(json.dumps(document(), indent=1, ensure_ascii=False))
