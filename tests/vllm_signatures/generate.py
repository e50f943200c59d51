"""Write down what a vLLM has of the names the plugin binds: `python -m tests.vllm_signatures.generate ROOT VERSION`.

ROOT is an unpacked wheel (the directory that holds vllm/). The result is VERSION.json beside this file.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from engine_plugins.vllm.signatures import NAMES, in_source


def main(root: Path, version: str) -> None:
    out: dict[str, dict[str, list[str]] | None] = {}
    for name in NAMES:
        found = in_source(root, name.module, name.name)
        fields = None if found is None else dataclasses.asdict(found)
        # of a class, what is asked of it and is there: the rest is of no use here
        if fields is not None and name.attributes:
            fields["attributes"] = [one for one in name.attributes if one in fields["attributes"]]
        out[f"{name.module}:{name.name}"] = fields
    path = Path(__file__).with_name(f"{version}.json")
    path.write_text(json.dumps(out, indent=1) + "\n")
    print(f"{path.name}: {len(out)} names")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
