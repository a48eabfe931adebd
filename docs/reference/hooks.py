"""Lets mkdocs build a site from pages that are read in the repository, too."""

import re
from collections.abc import Mapping
from typing import Any

UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)[^)]*\)")
NAMED_BY_FILE = re.compile(r"\[(\w+\.md)\]\((\w+\.md)(#[\w-]+)?\)")
# What the generator of the page of routes writes besides: another title, and a remark on each example.
TITLE = re.compile(r'^# .*<span class="api-version">.*$', re.MULTILINE)
REMARK = re.compile(r'^ *<span class="small-note">.*</em>', re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Mapping[str, Any], **_: Any) -> str:
    """Leave of links to files of the repository the text, and call pages by their titles."""
    titles = dict(_titles(config["nav"]))
    depth = page.file.src_uri.count("/")
    markdown = UPWARDS.sub(lambda link: link[1] if link[2].count("../") > depth else link[0], markdown)
    markdown = NAMED_BY_FILE.sub(lambda found: f"[{titles[found[1]]}]({found[2]}{found[3] or ''})", markdown)
    return REMARK.sub("", TITLE.sub("", markdown))


def _titles(nav: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (file, title) of each page."""
    found = []
    for entry in nav:
        for title, inside in entry.items():
            found += [(inside, title)] if isinstance(inside, str) else _titles(inside)
    return found
