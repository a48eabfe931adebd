import ast
import re
from pathlib import Path

import pytest

from spmd_tx.config import ServerConfig
from tests import write_models_page, write_options_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PACKAGE = ROOT / "spmd_tx"
PACKAGES = {str(file.parent.relative_to(ROOT)): file for file in PACKAGE.rglob("__init__.py")}
# A recipe of tinker-cookbook, and an example that was here once
NOT_OURS = {"distill_off_policy.py", "docs/examples/send_metrics.py"}

named = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def test_the_page_of_options_is_written_from_the_options():
    written = write_options_page.PAGE.read_text()
    assert written == write_options_page.page(), f"run: {write_options_page.COMMAND}"


@pytest.mark.parametrize("table", ["families", "full", pytest.param("devices", marks=pytest.mark.slow)])
def test_the_page_of_models_has_the_tables_of_today(table):
    written = write_models_page.PAGE.read_text()
    assert written == write_models_page.page(table), f"run: {write_models_page.COMMAND} {table}"


def test_every_option_is_on_its_page_with_its_default():
    defaults = ServerConfig(base_model="required")
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| `?([^|`]*?)`? \|", write_options_page.page(), re.MULTILINE))
    said_otherwise = {"bounds", "group", "groups", "processes_beside"}
    expected = {
        name: getattr(defaults, name) for name in ServerConfig.__struct_fields__ if name not in said_otherwise
    }
    # Each of the bounds has a default, in docs/limits.md; a group that is added has those of docs/groups.md.
    expected |= {"config": None, "limit": None, "group": None}
    assert rows == {
        name.replace("_", "-"): "" if value is None else str(value) for name, value in expected.items()
    }


def test_the_readme_is_read_in_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@named
def test_links_lead_somewhere(page):
    for target, fragment in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if fragment:
            assert fragment in anchors(file), f"{page.name} links to {target}#{fragment}"


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@named
def test_every_module_that_is_named_exists(page):
    for name in re.findall(r"`([\w./-]+\.py)[^`]*`", page.read_text()):
        places = [ROOT / name, PACKAGE / name, PACKAGE / "coordinator" / name]
        assert name in NOT_OURS or any(place.exists() for place in places), f"{page.name} names {name}"


@named
def test_a_link_that_is_called_like_a_module_leads_to_it(page):
    for text, target in re.findall(r"\[`([^`]+\.py)`\]\(([^)]+)\)", page.read_text()):
        assert f"/{target}".endswith(f"/{text}"), f"{page.name} calls {target} {text}"


def test_every_package_says_its_job_in_one_sentence_and_nothing_else():
    for package, file in PACKAGES.items():
        (statement,) = ast.parse(file.read_text()).body
        job = ast.get_docstring(ast.Module([statement], []))
        assert job, f"{package} does not say what it is for"
        assert job.endswith("."), package
        assert not re.search(r"[.!?]\s", job), f"{package} takes more than one sentence"


def test_the_map_of_the_architecture_has_every_package_with_its_own_words():
    lines = map_of(DOCS / "architecture.md")
    assert {name: job for name, job in lines.items() if name.split("/")[0] == PACKAGE.name} == {
        package: ast.get_docstring(ast.parse(file.read_text())) for package, file in PACKAGES.items()
    }


def test_the_map_of_the_architecture_has_every_other_folder():
    """Tests of a package are in the folder of its name, which needs no line of its own."""
    others = {name for name in map_of(DOCS / "architecture.md") if name.split("/")[0] != PACKAGE.name}
    tests = {f"tests/{folder.name}" for folder in folders(ROOT / "tests") if not is_package(folder.name)}
    tools = {f"tools/{folder.name}" for folder in folders(ROOT / "tools")}
    assert others == {
        *("launch", "console", "docs", "docs/engineering_notes", "docs/examples", "tests", "tools"),
        *(tests - {"tests/tools"}),
        *tools,
    }


def test_our_own_words_are_those_of_the_code():
    code = " ".join(file.read_text().lower() for file in PACKAGE.rglob("*.py"))
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", (DOCS / "words.md").read_text(), re.MULTILINE)
    assert words == sorted(words)
    assert [word for word in words if not re.search(rf"\b{word}", code)] == []


def map_of(page: Path) -> dict[str, str]:
    """The lines of a page's map: each folder, by its path from the root, and what is said of it."""
    (text,) = re.findall(r"<!-- map -->\n+```text\n(.*?)```", page.read_text(), re.DOTALL)
    lines: dict[str, str] = {}
    above: list[str] = []
    for line in text.splitlines():
        indent, name, job = re.fullmatch(r"( *)([\w/]+)/ +(.*)", line).groups()
        above = [*above[: len(indent) // 2], name]
        lines["/".join(above)] = job
    return lines


def folders(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_dir() and any(each.rglob("*.py"))]


def is_package(name: str) -> bool:
    return f"{PACKAGE.name}/{name}" in PACKAGES
