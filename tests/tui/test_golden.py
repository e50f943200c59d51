"""The overview in every size, theme and state, against kept screens (tests/tui/golden).

A kept file is the screen's text with the styles of each line, so a difference reads as one. After a wanted change write them anew:
`AGENTGUARD_UPDATE_GOLDEN=1 python -m pytest tests/tui/test_golden.py`, and read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tui.scenes import STATES
from tests.tui.screen import THEMES, dump, running

GOLDEN = Path(__file__).with_name("golden")
SIZES = ((60, 20), (80, 24), (120, 40), (200, 60))
UPDATE = bool(os.environ.get("AGENTGUARD_UPDATE_GOLDEN"))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("theme", THEMES)
def test_overview(theme: str, state: str, golden: dict[tuple[str, str], str]) -> None:
    """All sizes of a theme and a state in one file."""
    path = GOLDEN / f"overview-{state}-{theme}.txt"
    if UPDATE:
        path.write_text(golden[theme, state])
    assert golden[theme, state] == path.read_text()


@pytest.fixture(scope="module")
def golden() -> dict[tuple[str, str], str]:
    """Every screen of the matrix. One app per theme and size shows all states one after the other, which also tests that nothing
    of one state is left behind in the next."""
    import asyncio

    async def draw() -> dict[tuple[str, str], str]:
        screens: dict[tuple[str, str], list[str]] = {}
        for theme, name in THEMES.items():
            for size in SIZES:
                async with running(STATES["healthy"](), size, name) as run:
                    for state, scene in STATES.items():
                        await run.show(scene())
                        screens.setdefault((theme, state), []).append(f"# {size[0]}×{size[1]}\n{dump(run.app)}")
        return {key: "\n".join(parts) for key, parts in screens.items()}

    return asyncio.run(draw())
