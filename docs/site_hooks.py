"""For MkDocs: links that leave docs/ become the path they name, as the site holds docs/ alone."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def plain(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        if not path.startswith("../"):
            return found[0]
        words, inside = found[1], path.removeprefix("../")
        return words if inside in words else f"{words} (`{inside}`)"

    return _LINK.sub(plain, markdown)
