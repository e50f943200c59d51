"""Coding agents for the tests, into the user's cache: `python -m tests.proxy.clients [--npm]` (about 600 MB, with --npm 1.6 GB).

mini-swe-agent gets an environment of its own from its hash lock: it wants openai < 3 beside a newer rich than LiteLLM's proxy. The
npm packages run without their install scripts; each ships its program as a package of the platform.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from agentguard.dirs import cache_dir

ROOT = cache_dir() / "clients"
BIN = ROOT / "bin"
LOCK = Path(__file__).parents[2] / "locks" / "mini-swe-agent-2.4.6-cp311-linux_x86_64.txt"
NPM = {
    "claude": ("@anthropic-ai/claude-code@2.1.197", "@anthropic-ai/claude-code-linux-x64/claude"),
    "codex": ("@openai/codex@0.171.0", ".bin/codex"),
    "opencode": ("opencode-ai@1.18.33", "opencode-linux-x64/bin/opencode"),
    "qwen": ("@qwen-code/qwen-code@0.15.10", ".bin/qwen"),
}


def link(name: str, target: Path) -> None:
    BIN.mkdir(parents=True, exist_ok=True)
    (BIN / name).unlink(missing_ok=True)
    (BIN / name).symlink_to(target)


def mini() -> None:
    """The stamp is written last, so an interrupted set-up is done again."""
    home, stamp = ROOT / "mini", ROOT / "mini" / f".{LOCK.stem}"
    if not stamp.is_file():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--require-hashes", "--only-binary", ":all:", "--requirement", LOCK], check=True)
        stamp.touch()
    link("mini", home / "bin" / "mini")


def npm() -> None:
    if shutil.which("npm") is None:
        sys.exit("npm is not on PATH; Claude Code, Codex, opencode and qwen-code need Node 20")
    stamp = ROOT / ("." + "+".join(package.rpartition("/")[2] for package, _ in NPM.values()))
    if not stamp.is_file():
        install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(ROOT)]
        subprocess.run([*install, *(package for package, _ in NPM.values())], check=True)
        stamp.touch()
    for name, (_, program) in NPM.items():
        link(name, ROOT / "node_modules" / program)


if __name__ == "__main__":
    ROOT.mkdir(parents=True, exist_ok=True)
    mini()
    if "--npm" in sys.argv[1:]:
        npm()
