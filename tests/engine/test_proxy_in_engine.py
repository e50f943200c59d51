"""LiteLLM in front of a real vLLM with our plugin: the SDKs on the reference pair, and coding agents on the SmolLM2 target.

The agents' prompts are thousands of tokens long, which the reference pair's vocabulary of single characters cannot hold, so theirs
run where 'make smollm2' built that target. What the model says is of no interest; that the conversation holds is.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from agentguard.engines.vllm_process import free_port
from agentguard.events import Event, StepFinished, TraceClosed
from agentguard.gateway.server import serve_stack
from agentguard.policy import Policy
from agentguard.proxy.environment import prepare
from agentguard.proxy.process import litellm_process
from agentguard.telemetry.hub import Hub
from tests.conftest import RunningStack
from tests.proxy.clients import BIN
from tests.proxy.conftest import Behind, home  # noqa: F401
from tests.proxy.smollm2 import built, folder
from tests.proxy.test_clients import COMMANDS, IDS, run_agent_in
from tests.proxy.test_protocols import ASKS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.proxy,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]
LONG = "a=47;b=a+8;c=b-3;d=c+9;e=d-2;f=e+1;g=f+7;h=g-6;?h;!40"
BUDGET = 40
SMALL_BUDGET = 8


@dataclass
class Served:
    gateway: str
    proxy: str
    key: str
    events: list[Event]

    def finished(self, mark: int) -> list[StepFinished]:
        return [e for e in self.events[mark:] if isinstance(e, StepFinished)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def litellm_before_it(running: RunningStack) -> AsyncIterator[Behind]:
    key, guard = f"sk-{secrets.token_hex(32)}", running.stack.guard
    command, url = prepare(), running.stack.url
    async with litellm_process(command, model=guard.info.model, gateway=url, master_key=key, port=free_port()) as proxy:
        yield Behind(None, guard, running.events, url, proxy, key)  # type: ignore[arg-type]


@pytest_asyncio.fixture(loop_scope="session")
async def reference(litellm_before_it: Behind) -> AsyncIterator[Behind]:
    yield litellm_before_it
    while litellm_before_it.clients:
        await litellm_before_it.clients.pop().close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", list(ASKS))
async def test_an_sdk_is_recognised_counted_and_kept_to_its_budget(reference: Behind, protocol: str, stream: bool) -> None:
    mark, headers = len(reference.events), {"x-session-id": f"sdk-{protocol}-{stream}"}
    asked = [{"role": "user", "content": LONG}]
    prompt = {"input": LONG, "model": reference.guard.info.model} if protocol == "responses" else {"messages": asked}
    if protocol == "chat":
        prompt["model"] = reference.guard.info.model
    thinking = {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}
    budget = thinking if protocol == "messages" else {"extra_body": {"thinking_token_budget": BUDGET}}
    for seed in (1, 2):
        turn = await ASKS[protocol](
            reference, stream=stream, tools=False, extra_headers=headers,
            **prompt | budget | ({"seed": seed} if protocol == "chat" else {}),
        )  # fmt: skip
        assert turn.text.strip()
        assert turn.finish in ("stop", "length", "end_turn", "max_tokens", "completed", "incomplete")
    steps = [e for e in reference.events[mark:] if isinstance(e, StepFinished)]
    assert [(s.session.partition("/")[2], s.step) for s in steps] == [(headers["x-session-id"], 1), (headers["x-session-id"], 2)]
    assert all(s.think_tokens <= BUDGET and not s.error and not s.estimated for s in steps)
    assert any(s.closed == "budget" and s.think_tokens == BUDGET for s in steps)


@pytest.mark.parametrize("name", ["openai-sdk", "anthropic-sdk"])
async def test_an_sdk_s_example_runs_as_its_readme_says(reference: Behind, tmp_path: Path, name: str) -> None:
    example = Path(__file__).parents[2] / "examples" / name / "agent.py"
    mark, command = len(reference.events), [sys.executable, str(example)]
    code, out, said = await run_agent_in(command, reference.proxy.url, reference.gateway, reference.key, tmp_path)
    assert code == 0, out + said
    steps = [e for e in reference.events[mark:] if isinstance(e, StepFinished)]
    assert len(steps) == {"openai-sdk": 2, "anthropic-sdk": 1}[name]
    assert len({s.session for s in steps}) == 1
    assert steps[0].session.partition("/")[2].startswith("example-")
    assert all(s.think_tokens <= 200 for s in steps)
    assert len(out.splitlines()) == 2


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def smollm2(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Left alone it wanders on for ever, so a full stop ends what it says, as its own end token would."""
    if not built():
        pytest.skip("the SmolLM2 target is not there; 'make smollm2' builds it")
    target = tmp_path_factory.mktemp("smollm2") / "target"
    target.mkdir()
    for file in (folder() / "target").iterdir():
        (target / file.name).symlink_to(file)
    # the likeliest token always: sampled, this model writes garbage, in which no full stop has to come
    settings = json.loads((target / "generation_config.json").read_text()) | {"eos_token_id": ENDS, "top_k": 1}
    (target / "generation_config.json").unlink()
    (target / "generation_config.json").write_text(json.dumps(settings))
    template = (target / "chat_template_think.jinja").read_text()
    assert template.count(OPENED) == 1
    (target / "chat_template_think.jinja").unlink()
    (target / "chat_template_think.jinja").write_text(template.replace(OPENED, OPENED + BEGUN))
    policy = Policy.model_validate(
        {
            "model": str(target),
            "cutoff": {"think_tokens": SMALL_BUDGET},
            "engine": {
                "max_model_len": 8192,
                "dtype": "bfloat16",
                "tool_parser": "hermes",
                "extra_args": [
                    "--chat-template", str(target / "chat_template_think.jinja"),
                    "--override-generation-config", '{"max_new_tokens": 400}',
                ],
            },
        }
    )  # fmt: skip
    events: list[Event] = []
    hub, key = Hub(), f"sk-{secrets.token_hex(32)}"
    with hub.sink(events.append):
        async with (
            serve_stack(policy, hub=hub) as stack,
            litellm_process(prepare(), model="target", gateway=stack.url, master_key=key, port=free_port()) as proxy,
        ):
            yield Served(stack.url, proxy.url, key, events)


ENDS = [2, 30]
"""<|im_end|> and the full stop."""
OPENED, BEGUN = "<think>\n", "The alphabet is A B C D E F G H I J"
"""The template begins a trace that this model goes on with for more than twenty tokens, behind any prompt that was tried."""
# qwen-code's 15 tools alone fill the window
SMALLER = {
    "claude": ["--tools", "Bash", "--system-prompt", "You are an agent."],
    "codex": [],
    "opencode": [],
    "mini": ["--config", "mini.yaml", "--config", "agent.step_limit=3"],
}


@pytest.mark.clients
@pytest.mark.parametrize("client", list(SMALLER))
async def test_an_agent_talks_to_a_small_model_and_ends_normally(smollm2: Served, client: str, home: Path) -> None:  # noqa: F811
    if not (BIN / client).exists():
        pytest.skip(f"{client} is not installed; 'make test-clients' does it")
    mark = len(smollm2.events)
    small = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024"}
    command = [*COMMANDS[client], *SMALLER[client]]
    code, out, said = await run_agent_in(command, smollm2.proxy, smollm2.gateway, smollm2.key, home, **small)
    assert code == 0, out + said
    steps = smollm2.finished(mark)
    assert steps, out + said
    assert all(re.fullmatch(IDS[client], s.session.partition("/")[2]) for s in steps)
    ends = [(s.think_tokens, s.closed, s.finish_reason, s.error) for s in steps]
    assert ends == [(SMALL_BUDGET, "budget", "stop", "")] * len(steps)
    assert sorted(s.step for s in steps) == list(range(1, len(steps) + 1))  # opencode runs its two at once
    closed = [e for e in smollm2.events[mark:] if isinstance(e, TraceClosed)]
    assert [(e.reason, e.how) for e in closed] == [("budget", "engine")] * len(steps)
    assert f"{len(steps)} step" in said
