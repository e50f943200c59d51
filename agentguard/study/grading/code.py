"""Code answers: taken out of the reply, put before the task's tests, and run in the sandbox."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from agentguard.study.grading.sandbox import run

_FENCED = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
TIMEOUT_S = 10.0


def code_of(reply: str, defines: str = "") -> str:
    """The last fenced block that defines ``defines`` ("" for any), else the last block, else the reply itself."""
    blocks = _FENCED.findall(reply)
    named = [b for b in blocks if re.search(rf"\b(?:def|class)\s+{re.escape(defines)}\b", b)] if defines else blocks
    return str((named or blocks or [reply])[-1])


@dataclass(frozen=True, slots=True)
class Call:
    """One test: what goes in, and what must come out. ``stdin``: both are text; else arguments, and a value, as JSON."""

    given: Any
    wanted: Any
    stdin: bool


def passes_humaneval(reply: str, prompt: str, test: str, entry_point: str) -> bool:
    """HumanEval's ``check``: the reply is the whole function, or what completes the prompt."""
    code = code_of(reply, entry_point)
    whole = code if re.search(rf"\bdef\s+{re.escape(entry_point)}\b", code) else prompt + code
    # the helpers and imports of the prompt come first, in case the reply has the function alone
    return _passed(f"{prompt}\n    pass\n{whole}\n{test}\ncheck({entry_point})\n")


def passes_calls(reply: str, calls: list[Call], function: str = "") -> bool:
    """LiveCodeBench: every call in turn. ``function``: name of the function, or of the method of ``Solution``, for calls that are
    not by standard input. Outputs are compared line by line without space at the ends."""
    code = code_of(reply, "Solution" if "class Solution" in reply else function)
    for call in calls:
        if call.stdin:
            ran = run(code, str(call.given), timeout_s=TIMEOUT_S)
            if not ran.ok or _lines(ran.output) != _lines(str(call.wanted)):
                return False
        elif not _passed(
            _FUNCTIONAL.format(code=code, function=function, given=json.dumps(call.given), wanted=json.dumps(call.wanted))
        ):
            return False
    return bool(calls)


_FUNCTIONAL = """{code}
import json
_f = getattr(Solution(), "{function}") if "Solution" in globals() else {function}
assert json.loads(json.dumps(_f(*json.loads({given!r})))) == json.loads({wanted!r})
"""


def _passed(program: str) -> bool:
    """The program's last line was reached: a status of 0 alone would also come of ``sys.exit(0)`` before the tests."""
    mark = secrets.token_hex(16)
    ran = run(f"{program}\nprint({mark!r})\n", timeout_s=TIMEOUT_S)
    return ran.ok and ran.output.rstrip().endswith(mark)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
