"""The documentation site has every page; `make docs` checks links and anchors."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_site_and_every_entry_is_a_page():
    entries = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert len(entries) == len(pages)
    assert set(entries) == pages


def test_the_modules_of_the_reference_exist():
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    modules = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert modules
    for module in modules:
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
