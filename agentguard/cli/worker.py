"""One gateway process of several: `agentguard.gateway.workers` starts it and writes its orders to its stdin."""

from __future__ import annotations

import sys

import msgspec

from agentguard.cli.run import run
from agentguard.errors import AgentGuardError
from agentguard.gateway.workers import Orders, work


def main() -> None:
    # byte by byte: what stands behind the line is left in the pipe, whose end the worker waits for
    line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]
    try:
        run(work(msgspec.json.decode(line, type=Orders)), serves=True)
    except KeyboardInterrupt:
        sys.exit(0)
    except AgentGuardError as error:
        print(f"agentguard worker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
