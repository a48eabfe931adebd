"""Every command, option and route in the documentation exists, and takes the arguments shown."""

import ast
import importlib.util
import re
import shlex
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from tinker.cli.__main__ import main_cli as tinker_cli

from spmd_tx.cli import other_names
from spmd_tx.cli.main import app
from spmd_tx.coordinator.http.app import make_app
from tests.support.pages import PAGES, ROOT, ShellCommand, inline_codes, parse, shell_commands

SPMD_TX: Any = typer.main.get_command(app)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_OURS = {
    "apt-get",
    "cp",
    "createdb",
    "curl",
    "export",
    "cd",
    "git",
    "helm",
    "pg_dump",
    "pg_restore",
    "pre-commit",
}
OF_OTHERS = ("tinker_cookbook",)  # modules that are not installed here
OPTIONS_OF_OTHERS = ("--enable-lora", "--lora-paths", "--xla_")
OUTSIDE_THE_SCHEMA = {"/schema/openapi.json": {"GET"}}
METHODS = "GET|HEAD|POST|PUT|DELETE"
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def shown() -> Any:
    """Parametrize a test with the commands of all pages."""
    found = [(page.stem, command) for page in PAGES for command in shell_commands(page, set(CHECKS))]
    ids = [f"{page}: {command}" for page, command in found]
    return pytest.mark.parametrize("command", [command for _, command in found], ids=ids)


@named
def test_options_that_are_named_exist(page):
    for code in inline_codes(page):
        found = re.match(r"--[a-z][a-z0-9-]*", code)
        if found and not code.startswith(OPTIONS_OF_OTHERS):
            assert found[0] in all_options(), f"{page.name} names {code}"


@named
def test_routes_that_are_named_exist(page):
    for code in inline_codes(page):
        if found := re.fullmatch(rf"({METHODS}) (/[^ ?]*)(\?\S*)?", code):
            check_route(found[1], found[2])
        elif found := re.fullmatch(
            r"(/(?:api/v1|oai|console/api|healthz|readyz|metrics)[^ ?]*)(\?\S*)?", code
        ):
            check_route(None, found[1])


def check_spmd_tx(command: ShellCommand) -> None:
    check_click(SPMD_TX, command)


def check_tinker(command: ShellCommand) -> None:
    check_click(tinker_cli, command)


def check_click(program: Any, command: ShellCommand) -> None:
    """Find the subcommand and parse its arguments; a whole command has all that is required, too.

    Words in capitals stand for something else: a subcommand, or a value of any type.
    """
    parser, words = program, list(command.arguments)
    context = parser.context_class(parser)
    while words and hasattr(parser, "get_command"):
        if words[0].isupper():
            return
        name = words.pop(0)
        parser = parser.get_command(context, name)
        assert parser is not None, f"there is no command {name}"
        context = parser.context_class(parser, info_name=name, parent=context)
    if words == ["--help"]:
        return
    values, rest, _ = parser.make_parser(context).parse_args(words)
    assert not rest, f"it does not take {rest}"
    for parameter in parser.get_params(context):
        value = values.get(parameter.name)
        is_placeholder = isinstance(value, str) and value.isupper()
        if command.is_whole or (isinstance(value, str | bool) and not is_placeholder):
            parameter.process_value(context, value)


def check_make(command: ShellCommand) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in command.arguments:
        name, is_variable, value = word.partition("=")
        pattern = rf"\$[({{]{name}[)}}]" if is_variable else rf"^{re.escape(name)}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile has no {name}"
        check_files(ShellCommand("make", tuple(value.split()), command.is_whole))


def check_python(command: ShellCommand) -> None:
    first, *words = command.arguments
    if first != "-m":
        return check_script(ROOT / first, words)
    module, *words = words
    if module.startswith(OF_OTHERS):
        return None
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    if spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    return check_script(Path(spec.origin or ""), words)  # type: ignore[union-attr]


def check_script(script: Path, words: list[str]) -> None:
    assert script.is_file(), f"there is no {script}"
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in options_in(script), f"it has no option {word}"


def check_pytest(command: ShellCommand) -> None:
    files = [word for word in command.arguments if word.startswith("tests/")]
    assert files
    check_files(command)
    if "-m" in command.arguments:
        marker = command.arguments[command.arguments.index("-m") + 1]
        assert any(
            each.startswith(f"{marker}:") for each in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]
        )


def check_pip(command: ShellCommand) -> None:
    """The extras of the project are those of pyproject.toml."""
    check_files(command)
    for word in command.arguments:
        if found := re.fullmatch(r"(?:\.|spmd_tx)\[(.*)\]", word):
            for extra in found[1].split(","):
                assert extra in PYPROJECT["project"]["optional-dependencies"], f"there is no extra {extra}"


def check_curl(command: ShellCommand) -> None:
    words = command.arguments
    method = "POST" if "-d" in words else "GET"
    if "-X" in words:
        method = words[words.index("-X") + 1]
    for word in words:
        if found := re.fullmatch(r"(?:\$\w+|http://[^/]+)(/[^?]*)(\?.*)?", word):
            check_route(method, found[1])


def check_files(command: ShellCommand) -> None:
    """What looks like a file of the repository is one."""
    for word in (command.program, *command.arguments):
        if re.match(r"(launch|docs|tests|spmd_tx)/", word):
            assert (ROOT / word.partition("::")[0]).exists(), f"there is no {word}"


def check_launcher(command: ShellCommand) -> None:
    """What follows the launcher's own arguments are options of ``spmd-tx serve``."""
    check_files(command)
    words = list(command.arguments)
    if "--wrap" in words:  # a command of its own
        program, *wrapped = shlex.split(words[words.index("--wrap") + 1].removeprefix("exec "))
        return CHECKS[program](ShellCommand(program, tuple(wrapped), command.is_whole))
    start = next((at for at, word in enumerate(words) if word == "--" or word.startswith("launch/")), -1)
    serve = ShellCommand("spmd-tx", ("serve", *words[start + 1 :]), command.is_whole)
    if len(words) > start + 1:
        check_spmd_tx(serve)


def check_container(command: ShellCommand) -> None:
    """Of what is built, the Dockerfile has the arguments; what is run in it is a command of ours."""
    kind, *words = command.arguments
    if kind == "build":
        dockerfile = (ROOT / "Dockerfile").read_text()
        given = [word for option, word in pairwise(words) if option == "--build-arg"]
        for name, _, value in (word.partition("=") for word in given):
            assert re.search(rf"^ARG {name}=", dockerfile, re.MULTILINE), (
                f"the Dockerfile has no argument {name}"
            )
            assert (
                name != "EXTRAS"
                or set(value.split(",")) <= PYPROJECT["project"]["optional-dependencies"].keys()
            )
        return
    if "spmd-tx" not in words:  # nothing of ours is run
        return
    image = words.index("spmd-tx")
    check_spmd_tx(ShellCommand("spmd-tx", tuple(words[image + 1 :]), command.is_whole))


CHECKS = {
    "spmd-tx": check_spmd_tx,
    ".venv/bin/spmd-tx": check_spmd_tx,
    "tinker": check_tinker,
    "make": check_make,
    "python": check_python,
    "pytest": check_pytest,
    ".venv/bin/pytest": check_pytest,
    "pip": check_pip,
    "curl": check_curl,
    "kubectl": check_files,
    "sbatch": check_launcher,
    "podman": check_container,
    "launch/multinode.sh": check_launcher,
}


@shown()
def test_commands_can_be_run_as_they_are_shown(command):
    assert command.program in {*CHECKS, *NOT_OURS}, f"{command.program} has no check here"
    CHECKS.get(command.program, check_files)(command)


@cache
def routes() -> dict[str, set[str]]:
    """The methods of each route in the OpenAPI document, by its path."""
    paths = make_app(None).openapi_schema.to_schema()["paths"]  # type: ignore[arg-type]  # no route is called
    return OUTSIDE_THE_SCHEMA | {path: {each.upper() for each in methods} for path, methods in paths.items()}


def check_route(method: str | None, address: str) -> None:
    """A route is named whole, or by how it begins; words in capitals, or in braces, stand for a parameter."""
    start = re.sub(r"/?(?:\.\.\.|…)$", "", address)
    found = [path for path in routes() if re.match(re.sub(r"\{\w+\}", "[^/]+", path) + "$", address)]
    found = found or [path for path in routes() if path.startswith(f"{start}/")]
    assert found, f"there is no route {address}"
    assert method is None or any(method in routes()[path] for path in found), f"no {method} {address}"


@cache
def options_in(script: Path) -> set[str]:
    """The options that a script declares, as strings in its source."""
    source = script.read_text()
    if not re.search(r"""["']--[a-z]""", source):
        return set()  # to parse every script takes seconds
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return {each for each in strings if isinstance(each, str) and re.fullmatch(r"--[a-z][a-z0-9-]*", each)}


@cache
def all_options() -> set[str]:
    """Options of all commands that the documentation speaks of."""
    folders = ROOT / "tests", ROOT / "tools", ROOT / "docs" / "examples"
    scripts = [script for folder in folders for script in folder.rglob("*.py")]
    return {"--help"}.union(click_options(SPMD_TX), click_options(tinker_cli), *map(options_in, scripts))


def click_options(program: Any) -> set[str]:
    context = program.context_class(program)
    own = {name for parameter in program.params for name in (*parameter.opts, *parameter.secondary_opts)}
    own |= {f"--{name}" for name in (*other_names.DECIDED, *other_names.RENAMED, other_names.CONFIG)}
    names = program.list_commands(context) if hasattr(program, "list_commands") else []
    return own.union(*(click_options(program.get_command(context, name)) for name in names))


@pytest.mark.parametrize(
    "wrong",
    [
        "spmd-tx serves --base-model m",
        "spmd-tx serve --base-models m",
        "spmd-tx serve",
        "spmd-tx serve --base-model m --port many",
        "tinker checkpoint lists",
        "make deem",
        "python -m tools.bench.nothing",
        "python docs/examples/train.py --ranks 3",
        "pip install '.[cuda99]'",
        "curl http://HOST:8000/api/v1/nothing",
        "launch/multinode.sh a b -- --base-model m --tensors 3",
        "kubectl apply -f launch/nothing.yaml",
    ],
)
def test_a_wrong_command_is_found(wrong):
    (command,) = parse(wrong)
    with pytest.raises(Exception):  # noqa: B017, PT011  # of click, or an assertion
        CHECKS[command.program](command)
