"""The documentation site has every page; `make docs` checks links and anchors."""

import re
from pathlib import Path

from tests import write_figures, write_openapi

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


def test_every_route_says_what_it_does():
    for path, operations in write_openapi.document()["paths"].items():
        for operation in operations.values():
            assert operation["summary"].endswith("."), path


def test_every_route_is_on_one_page_with_the_types_that_it_uses():
    pages, whole = write_openapi.parts(), write_openapi.document()
    assert sorted(path for page in pages.values() for path in page["paths"]) == sorted(whole["paths"])
    for name, page in pages.items():
        assert page["paths"]
        types = page["components"]["schemas"]
        assert write_openapi.types_in(page["paths"], types) == set(types)
        assert (ROOT / "docs" / "reference" / f"http_{name}.md").exists()


def test_figures_are_drawn_from_the_tables_of_today():
    for name, svg in write_figures.figures().items():
        assert (ROOT / "docs" / name).read_text() == svg, f"run: {write_figures.COMMAND}"


def test_every_picture_is_shown_somewhere():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    pictures = [*(ROOT / "docs").glob("*.png"), *(ROOT / "docs").glob("*.svg")]
    assert [picture.name for picture in pictures if picture.name not in pages] == []
