"""README as a package index shows it: what it links to in this repository is not there, so only the words stay."""

from __future__ import annotations

import re
from pathlib import Path

# ![a figure](docs/figures/a.svg) or [words](docs/start.md#heading), and not [![a badge](https://...)](https://...)
RELATIVE_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+:)[^()\s]+\)")


def dynamic_metadata(field: str, settings: object = None) -> dict[str, str]:  # noqa: ARG001 -- as scikit-build-core calls it
    """The metadata `readme`: README.md without relative links and figures."""
    text = Path("README.md").read_text(encoding="utf-8")
    return {
        "content-type": "text/markdown",
        "text": RELATIVE_LINK.sub(lambda found: "" if found[1] else found[2], text),
    }
