"""The plugin's HTTP routes on vLLM's API server, a `vllm.endpoint_plugins` entry point.

vLLM loads it only where `VLLM_PLUGINS` names it: ``VLLM_PLUGINS=agentguard,agentguard_http``. The routes lie under /v1 because
vLLM asks for its API key only there (entrypoints/serve/middleware/authenticate.py).
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from agentguard import __version__

router = APIRouter(prefix="/v1/agentguard")


class SetBudget(BaseModel):
    """``request``: the X-Request-Id the step was sent with. ``tokens``: its think tokens from now on, 0 closes the trace now."""

    model_config = ConfigDict(extra="forbid")

    request: str = Field(min_length=8, max_length=256)
    tokens: int = Field(ge=0)


@router.get("/plugin")
async def plugin() -> dict[str, Any]:
    """What this engine's plugin can do; a stock server answers 404."""
    return {"version": __version__, "features": ["rules", "budget"]}


@router.post("/budget")
async def set_budget(body: SetBudget, request: Request) -> JSONResponse:
    """Change a running request's think budget by collective RPC: ordered with the engine's steps, on every rank.

    404 when no such request runs (it has ended, or has not begun).
    """
    client = request.app.state.engine_client
    ranks = await client.collective_rpc("ag_set_budget", timeout=30, args=(body.request, body.tokens))
    found = [rank for rank in ranks if rank["found"]]
    if not found:
        message = f"request={body.request!r}: no such request runs in this engine"
        return JSONResponse({"error": {"message": message, "type": "not_found", "code": 404}}, 404)
    return JSONResponse(found[0])


class Endpoints:
    """vLLM's `EndpointPlugin` protocol."""

    name = "agentguard_http"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Nothing to prepare: vLLM keeps the engine's client in the app's state."""
