"""A program with a guarded `litellm.acompletion`: python guarded_litellm.py URL SITE_PACKAGES, in LiteLLM's own environment.

SITE_PACKAGES is where the few libraries are that the SDK needs and LiteLLM's environment lacks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.append(sys.argv[2])
sys.path.insert(0, str(Path(__file__).parents[2]))

import litellm

import agentguard


async def main(url: str) -> None:
    acompletion = agentguard.wrap(litellm.acompletion, window=1000, policy={"cutoff": {"loops": False}})
    ask = {
        "model": "hosted_vllm/scripted",
        "messages": [{"role": "user", "content": "hi"}],
        "api_base": f"{url}/v1",
        "api_key": "k",
    }
    whole = await acompletion(**ask, max_tokens=100, extra_body={"top_k": 3})
    stream = await acompletion(**ask, stream=True, extra_headers={"x-session-id": "two"})
    pieces = [piece async for piece in stream]
    try:
        await acompletion(**{**ask, "messages": [{"role": "user", "content": "refuse"}]})
        refused = ""
    except litellm.RateLimitError as error:
        refused = type(error).__name__
    told = {
        "classes": [type(whole).__name__, type(pieces[0]).__name__],
        "content": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "thought": whole.usage.completion_tokens_details.reasoning_tokens,
        "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
        "refused": refused,
    }
    print(json.dumps(told))


asyncio.run(main(sys.argv[1]))
