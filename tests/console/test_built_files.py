import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "console"
STATIC = ROOT / "spmd_tx/coordinator/http/console/static"
BUILT = [file for file in STATIC.rglob("*") if file.is_file()]
INDEX = (STATIC / "index.html").read_text()


def source_digest() -> str:
    """As console/build.mjs computes it."""
    files = [file for file in SOURCE.rglob("*") if file.is_file()]
    paths = sorted(file.relative_to(SOURCE).as_posix() for file in files)
    digest = hashlib.sha256()
    for path in paths:
        if not path.startswith("node_modules/"):
            digest.update(path.encode() + b"\0" + (SOURCE / path).read_bytes() + b"\0")
    return digest.hexdigest()


def test_the_built_files_belong_to_the_source():
    assert f'<meta name="source" content="{source_digest()}">' in INDEX, "run: make console"


def test_nothing_is_fetched_from_elsewhere():
    for file in BUILT:
        addresses = re.findall(r"https?://[\w.-]+", file.read_text())
        assert set(addresses) <= {"http://www.w3.org"}, file.name  # the names of SVG and MathML
    assert '"resolved"' not in (SOURCE / "package-lock.json").read_text()


def test_the_page_obeys_a_strict_content_security_policy():
    assert not re.search(r"<style|\sstyle=|\son\w+=", INDEX)
    assert all(' src="/console/assets/' in tag for tag in re.findall(r"<script[^>]*>", INDEX))


def test_the_console_is_small():
    assert sum(file.stat().st_size for file in BUILT) < 300_000


def test_what_is_filled_into_an_address_is_encoded():
    """A template that begins like an address is tagged: addresses.ts encodes its parts, and nobody else."""
    texts = {file.name: file.read_text() for file in SOURCE.glob("src/**/*.ts*")}
    filled = [
        (name, *found) for name, text in texts.items() for found in re.findall(r"(\w*)`(/[^`]*\$\{.*)", text)
    ]
    assert len(filled) > 5  # the others are routes, which are filled by addresses.ts
    assert [each for each in filled if each[1] != "url"] == []
    assert [name for name, text in texts.items() if "encodeURIComponent" in text] == ["addresses.ts"]


def test_lines_fit_on_a_screen():
    files = [file for end in ("ts", "tsx", "mjs", "css") for file in SOURCE.rglob(f"*.{end}")]
    written = [file for file in files if "node_modules" not in file.parts and file.name != "api_types.ts"]
    assert len(written) > 40
    for file in written:
        longest = max(file.read_text().splitlines(), key=len)
        assert len(longest) <= 120, f"{file.name}: {longest}"
