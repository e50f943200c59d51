"""One gateway process of several: `agentguard.gateway.workers` starts it and writes its orders to its stdin."""

from __future__ import annotations

import sys

import msgspec

from agentguard.cli.run import run
from agentguard.errors import AgentGuardError
from agentguard.gateway.workers import Orders, work


def main() -> None:
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        line = pipe.readline()  # unbuffered: the pipe's end is what the worker waits for afterwards
    try:
        run(work(msgspec.json.decode(line, type=Orders)), serves=True)
    except KeyboardInterrupt:
        sys.exit(0)
    except AgentGuardError as error:
        print(f"agentguard worker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
