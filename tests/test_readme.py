import re
from pathlib import Path

from spmd_tx.config import ServerConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_option_is_in_the_table_with_its_default():
    defaults = ServerConfig(base_model="required")
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| `?([^|`]*?)`? \|", README, re.MULTILINE))
    expected = {name: getattr(defaults, name) for name in ServerConfig.__struct_fields__ if name != "bounds"}
    expected["limit"] = None  # each of the bounds has a default, in docs/limits.md
    assert rows == {
        name.replace("_", "-"): "" if value is None else str(value) for name, value in expected.items()
    }


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
