"""One streamed step with a think budget: `agentguard wrap -- python examples/anthropic-sdk/agent.py`."""

from __future__ import annotations

import json
import uuid

import anthropic


def main() -> None:
    user = json.dumps({"session_id": f"example-{uuid.uuid4()}"})
    with anthropic.Anthropic() as client, client.messages.stream(
        model="any", max_tokens=600, thinking={"type": "enabled", "budget_tokens": 200}, metadata={"user_id": user},
        messages=[{"role": "user", "content": "a=47;b=a+8;c=a-3;?c"}],
    ) as stream:  # fmt: skip
        for block in stream.get_final_message().content:
            text = block.thinking if block.type == "thinking" else block.text if block.type == "text" else ""
            print(f"{block.type:9}", " ".join(text.split())[:100])


if __name__ == "__main__":
    main()
