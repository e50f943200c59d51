"""The plugin's HTTP routes on vLLM's API server, a `vllm.endpoint_plugins` entry point.

vLLM loads it only where `VLLM_PLUGINS` names it: ``VLLM_PLUGINS=agentguard,agentguard_http``. The routes lie under /v1 because
vLLM asks for its API key only there (entrypoints/serve/middleware/authenticate.py).
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from agentguard import __version__
from agentguard.errors import ConfigError, PluginError
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts.control import RPC_S, Control, Plan

logger = logging.getLogger("vllm.agentguard")
TRAINER_START_S = 120.0

router = APIRouter(prefix="/v1/agentguard")


class SetBudget(BaseModel):
    """``request``: the X-Request-Id the step was sent with. ``tokens``: its think tokens from now on, 0 closes the trace now."""

    model_config = ConfigDict(extra="forbid")

    request: str = Field(min_length=8, max_length=256)
    tokens: int = Field(ge=0)


@router.get("/plugin")
async def plugin(request: Request) -> dict[str, Any]:
    """What this engine's plugin can do; a stock server answers 404."""
    return {"version": __version__, "features": ["rules", "budget", *(["tts"] if hasattr(request.app.state, "ag_tts") else [])]}


@router.get("/features")
async def features(request: Request) -> dict[str, Any]:
    """Which of vLLM's model runners this engine has, and each feature: its name, whether it is on, and why."""
    ranks = await request.app.state.engine_client.collective_rpc("ag_features", timeout=30)
    found: dict[str, Any] = ranks[0]
    return found


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


class SetTts(BaseModel):
    """``enabled``: false goes back to the draft's own weights, true learns on. ``settings``: knobs to change, over those in use."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool | None = None
    settings: dict[str, Any] | None = None


def _tts(request: Request) -> Control:
    control: Control | None = getattr(request.app.state, "ag_tts", None)
    if control is None:
        raise HTTPException(404, "this engine was started without tts; add it to the recipe")
    return control


@router.get("/tts")
async def tts(request: Request) -> JSONResponse:
    """How the draft's learning stands: state and reason, settings, the trainer's memory in bytes."""
    try:
        return JSONResponse(await _tts(request).look())
    except PluginError as error:
        return _unavailable(error)


@router.post("/tts")
async def set_tts(body: SetTts, request: Request) -> JSONResponse:
    """Pause, go on, or change settings; answers when the trainer is ready again. 400 for a knob that is wrong."""
    control = _tts(request)
    try:
        settings = None if body.settings is None else TtsSettings.parse(body.settings, base=control.settings)
    except ConfigError as error:
        return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}, 400)
    try:
        await control.configure(enabled=body.enabled, settings=settings)
        await control.settled(TRAINER_START_S)
    except (PluginError, TimeoutError) as error:
        return _unavailable(error)
    return JSONResponse(control.status())


def _unavailable(error: Exception) -> JSONResponse:
    body = {"message": f"tts: {error!r}; see GET /v1/agentguard/tts", "type": "engine_error", "code": 503}
    return JSONResponse({"error": body}, 503)


class Endpoints:
    """vLLM's `EndpointPlugin` protocol."""

    name = "agentguard_http"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start TTS where the engine has it; vLLM keeps the engine's client in the app's state by itself."""
        if engine_client is None:
            return
        config = engine_client.vllm_config
        settings = (config.additional_config or {}).get("agentguard", {})
        if settings.get("tts") is None or config.speculative_config is None:
            return
        if (getattr(args, "api_server_count", None) or 1) > 1 or config.parallel_config.data_parallel_size > 1:
            logger.warning(
                "agentguard: tts is off: it needs one API server and one engine; drop --api-server-count and data parallelism"
            )
            return

        async def rpc(method: str, arguments: tuple[Any, ...]) -> list[Any]:
            answers: list[Any] = await engine_client.collective_rpc(method, timeout=RPC_S, args=arguments)
            return answers

        speculative = config.speculative_config
        dtype = str(speculative.draft_model_config.dtype).removeprefix("torch.")
        plan = Plan(
            speculative.model,
            config.model_config.model,
            speculative.method,
            speculative.num_speculative_tokens,
            settings["frames"],
            dtype,
        )
        state.ag_tts = Control(rpc, plan, TtsSettings.parse(settings["tts"]))
        state.ag_tts_task = asyncio.create_task(state.ag_tts.run(), name="agentguard tts")  # ends with the server's loop
