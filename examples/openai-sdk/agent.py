"""Two steps of one session: `agentguard wrap -- python examples/openai-sdk/agent.py`."""

from __future__ import annotations

import uuid

import openai


def main() -> None:
    session = {"x-session-id": f"example-{uuid.uuid4()}"}
    with openai.OpenAI() as client:
        model = client.models.list().data[0].id
        messages: list[dict[str, str]] = []
        for question in ("a=47;b=a+8;c=a-3;?c", "a=ans;b=a+9;c=b-1;?c"):
            messages.append({"role": "user", "content": question})
            reply = client.chat.completions.create(
                model=model, messages=messages, max_tokens=600, temperature=1.0,  # type: ignore[arg-type]
                extra_headers=session, extra_body={"thinking_token_budget": 200},
            )  # fmt: skip
            message = reply.choices[0].message
            thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
            answer = " ".join((message.content or "").split())
            print(f"{question} -> {answer}  ({len(thought)} characters thought)")
            messages.append({"role": "assistant", "content": message.content or ""})


if __name__ == "__main__":
    main()
