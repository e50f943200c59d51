"""A two-step agent session through the gateway: start it with `agentguard serve --recipe recipes/reference-pair.yaml` first.

python examples/agent_session.py http://127.0.0.1:8484
"""

from __future__ import annotations

import sys

import httpx2


def main(url: str) -> None:
    messages: list[dict[str, str]] = []
    with httpx2.Client(base_url=url, headers={"X-Session-Id": "example-1"}, timeout=120) as client:
        for question in ("a=47;b=a+8;c=a-3;?c", "a=ans;b=a+9;c=b-1;?c"):
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "temperature": 1.0, "max_tokens": 600}
            reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            message, usage = reply["choices"][0]["message"], reply["usage"]
            thought = usage["completion_tokens_details"]["reasoning_tokens"]
            print(f"{question}  ->  {message['content'].strip()}   ({thought} of {usage['completion_tokens']} tokens thought)")
            messages.append({"role": "assistant", "content": message["content"]})
        print(client.get("/agentguard/sessions").json())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8484")
