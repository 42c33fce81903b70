"""What mkdocs asks for while it builds: pages made from the sources, and links to files that are not pages."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "python")]
import command_line  # noqa: E402 -- the folder is on the path now, and not later
import header  # noqa: E402
import tables  # noqa: E402

MADE = {"command line": command_line.markdown, "specens.h": header.markdown} | tables.TABLES
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Fill what is made from sources, then point links at what the site has."""
    markdown = re.sub(r"<!-- made: (.+?) -->", lambda found: MADE[found[1]](), markdown)
    return LINK.sub(lambda found: _link(found, page.file.src_uri, config), markdown)


def _link(found: re.Match[str], page: str, config: Any) -> str:
    """A link to a file of the repository that is no page: to where the repository is, or as code where nobody said."""
    image, label, target = found.groups()
    path, _, anchor = target.partition("#")
    docs = Path(config["docs_dir"])
    file = Path(os.path.normpath(docs / Path(page).parent / path))
    if image or file.is_relative_to(docs) or not file.exists():
        return found[0]  # mkdocs checks it
    if not config["repo_url"]:
        return label if "`" in label else f"{label} (`{file.relative_to(ROOT)}`)"
    return f"[{label}]({config['repo_url'].rstrip('/')}/blob/main/{file.relative_to(ROOT)}{'#' * bool(anchor)}{anchor})"
