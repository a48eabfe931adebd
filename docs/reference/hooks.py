"""Lets mkdocs build a site from pages that are read in the repository, too."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?!\w+\.md)[^)]*\)")  # a link to what is not on the site


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave of links to files of the repository the text."""
    return OUTSIDE.sub(lambda found: found[1], markdown)
