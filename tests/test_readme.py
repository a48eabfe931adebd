import re
from pathlib import Path

from spmd_tx.config import ServerConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GENERATED = ("_pb2.py", "_pb2.pyi")
ONE_LINE_FOLDERS = (ROOT / "spmd_tx" / "coordinator" / "migrations",)


def paths_in_the_tree() -> dict[str, str]:
    """Every path that the tree in the README shows, with its description."""
    tree = README.split("<!-- tree -->\n```text\n")[1].split("```")[0]
    folders: list[str] = []
    shown = {}
    for line in tree.splitlines():
        indent, name, description = re.fullmatch(r"( *)(\S+) *(.*)", line).groups()
        folders[len(indent) // 2 :] = [name]
        shown["".join(folders)] = description
        if not name.endswith("/"):
            folders.pop()
    return shown


def paths_on_disk() -> set[str]:
    """All files of the package, of launch/ and of docs/, their folders, and the folders of tests/."""
    found = {"tests/"} | {f"tests/{path.parent.name}/" for path in (ROOT / "tests").glob("*/*.py")}
    for top in ("spmd_tx", "launch", "docs"):
        for file in (ROOT / top).rglob("*"):
            if "__pycache__" in file.parts or file.is_dir():
                continue
            one_line = next((folder for folder in ONE_LINE_FOLDERS if folder in file.parents), None)
            folder = one_line or file.parent
            parents = [path for path in (folder, *folder.parents) if ROOT in path.parents]
            found |= {f"{path.relative_to(ROOT)}/" for path in parents}
            if not one_line and file.name != "__init__.py" and not file.name.endswith(GENERATED):
                found.add(str(file.relative_to(ROOT)))
    return found


def test_the_tree_shows_every_file_and_no_other():
    assert set(paths_in_the_tree()) == paths_on_disk()


def test_every_file_in_the_tree_is_described():
    assert [path for path, text in paths_in_the_tree().items() if not text and not path.endswith("/")] == []


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
