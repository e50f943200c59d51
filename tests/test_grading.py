"""Graders: right and wrong answers of each format, and hostile code that must not get out."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from agentguard.study.grading import code, sandbox, text
from agentguard.study.grading.sandbox import UID, SandboxError, run

walled = pytest.mark.skipif(bool(sandbox.why_not()), reason=f"no sandbox here: {sandbox.why_not()}")


@pytest.mark.parametrize(
    ("reply", "truth", "right"),
    [
        ("So he has 12 - 5 = 7 left.\n#### 7", "7", True),
        ("The answer is $1,200.", "1200", True),
        ("**Answer:** 42", "42", True),
        ("I get \\boxed{\\frac{1}{2}}... no: \\boxed{070}", "70", True),
        ("\\boxed{x^{2}+1} hence 5", "5", False),
        ("Each costs 3.50, so 2 cost 7.00", "7", True),
        ("The answer is -3", "3", False),
        ("The answer is 12. Check: 12 * 2 = 24", "12", True),
        ("We have 10 apples and 20 pears", "20", True),
        ("no number at all", "0", False),
        ("", "0", False),
        ("\\boxed{1{,}024}", "1024", True),
        ("The answer is 7 of course, not 8.", "8", False),
    ],
)
def test_numbers(reply: str, truth: str, right: bool) -> None:
    assert text.same_number(reply, truth) is right


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("The correct answer is (C).", "C"),
        ("Answer: **B**", "B"),
        ("First I thought the answer is A, but the answer is D", "D"),
        ("reasoning...\n(B)\n", "B"),
        ("\\boxed{C}", "C"),
        ("A good question deserves an answer", None),
        ("the answer is Because", None),
        ("", None),
    ],
)
def test_letters(reply: str, letter: str | None) -> None:
    assert text.letter(reply) == letter


def test_code_is_found_in_a_reply() -> None:
    reply = (
        "First:\n```python\ndef helper(): pass\n```\nthen\n```python\ndef solve(x):\n    return x\n```\nuse it:\n```\nsolve(3)\n```"
    )
    assert code.code_of(reply, "solve").startswith("def solve")
    assert code.code_of(reply).strip() == "solve(3)"
    assert code.code_of("def solve(x): return x") == "def solve(x): return x"


PROMPT = 'from typing import List\n\ndef total(numbers: List[int]) -> int:\n    """Sum of the numbers."""\n'
TEST = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"


@walled
@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("```python\ndef total(numbers):\n    return sum(numbers)\n```", True),
        ("    return sum(numbers)\n", True),
        ("```python\ndef total(numbers: List[int]) -> int:\n    return sum(numbers)\n```", True),
        ("```python\ndef total(numbers):\n    return 3\n```", False),
        ("```python\ndef total(numbers:\n```", False),
        ("```python\nimport sys\nsys.exit(0)\ndef total(numbers): ...\n```", False),
        ("```python\nimport os\ndef total(numbers):\n    os._exit(0)\n```", False),
        ("I cannot do that.", False),
    ],
)
def test_humaneval(reply: str, right: bool) -> None:
    assert code.passes_humaneval(reply, PROMPT, TEST, "total") is right


@walled
@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("```python\nn = int(input())\nprint(n * 2)\n```", True),
        ("```python\nimport sys\nprint(int(sys.stdin.buffer.read()) * 2)\n```", True),
        ("```python\nprint(int(open(0).read()) * 2)\n```", True),
        ("```python\nprint(6)\n```", False),
        ("```python\nprint(int(input()) * 2); print('and more')\n```", False),
    ],
)
def test_livecodebench_by_standard_input(reply: str, right: bool) -> None:
    calls = [code.Call("3\n", "6\n", stdin=True), code.Call("5\n", "10", stdin=True)]
    assert code.passes_calls(reply, calls) is right


@walled
def test_livecodebench_by_a_function() -> None:
    calls = [code.Call([[1, 2], "a'b"], [3, "a'b"], stdin=False)]
    method = "```python\nclass Solution:\n    def add(self, xs, s):\n        return (sum(xs), s)\n```"
    plain = "```python\ndef add(xs, s):\n    return [sum(xs), s]\n```"
    assert code.passes_calls(method, calls, "add")
    assert code.passes_calls(plain, calls, "add")
    assert not code.passes_calls(plain.replace("sum(xs)", "0"), calls, "add")
    assert not code.passes_calls(plain, [], "add"), "no test is no proof"


def test_without_a_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "why_not", lambda: "only root can drop to a user without rights")
    with pytest.raises(SandboxError, match="only root"):
        code.passes_humaneval(f"open({str(tmp_path / 'x')!r}, 'w')", PROMPT, TEST, "total")
    assert not list(tmp_path.iterdir())


def nobody_is_left() -> bool:
    """Killing the namespace's first process ends all others, a moment later."""
    for _ in range(100):
        if not any(p.info["uids"] is not None and p.info["uids"].real == UID for p in psutil.process_iter(["uids"])):
            return True
        time.sleep(0.05)
    return False


@walled
def test_an_endless_loop_ends_and_leaves_nothing() -> None:
    assert run("while True: pass", timeout_s=1).status is None
    assert nobody_is_left()


@walled
def test_a_fork_bomb_runs_into_its_limit_and_ends() -> None:
    bomb = "import os\nwhile True:\n    if os.fork() == 0:\n        while True: pass"
    ran = run(bomb, timeout_s=2)
    assert nobody_is_left()
    assert ran.status != 0
    assert "BlockingIOError" in ran.output or ran.status is None


@walled
def test_processes_that_hide_from_their_parent_end_too() -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork() or time.sleep(600)\n    os._exit(0)\nprint('gone')"
    )
    assert run(daemon, timeout_s=5).output.strip() == "gone"
    assert nobody_is_left()


@walled
@pytest.mark.parametrize("at", ["/tmp", "/var/tmp", "/etc", "/dev/shm", str(Path.home()), str(Path(__file__).parent)])
def test_no_file_is_left_behind(at: str) -> None:
    name = Path(at) / f"agentguard-{os.getpid()}"
    run(f"try:\n    open({str(name)!r}, 'w').write('x')\nexcept OSError as e:\n    print(e)")
    assert not name.exists()


@walled
def test_nothing_is_heard_on_the_network() -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)

        def listen() -> None:
            try:
                heard.append(server.accept()[0].recv(10))
            except TimeoutError:
                return

        thread = threading.Thread(target=listen)
        thread.start()
        ran = run(f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1).send(b'out')")
        thread.join()
    assert not ran.ok
    assert heard == []


@walled
@pytest.mark.parametrize(
    "hostile",
    [
        "x = bytearray(4 << 30)",
        "open('/tmp/big', 'wb').write(bytes(64 << 20))",
        "import os\nos.setuid(0)",
        "import os\nos.kill(1, 9)\nos.listdir('/root')",
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0 and open('/etc/agentguard', 'w')",
    ],
)
def test_other_ways_out_fail(hostile: str) -> None:
    assert not run(hostile, timeout_s=5).ok


@walled
def test_a_flood_of_output_is_cut() -> None:
    ran = run("while True: print('x' * 1000)", timeout_s=5)
    assert not ran.ok
    assert len(ran.output) <= 2000
