"""Contracts on the source that no linter knows: unique names of types, and few parameters."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spmd_tx"
MOST_PARAMETERS = 6
FORWARD_PASS = ("models/", "worker/steps/")  # takes arrays one by one

COMMAND_LINE = "cli/"  # a command's parameters are its options
MANY_PARAMETERS = {  # may only shrink
    "coordinator/requests/queue.py:submit",
}


Sources: TypeAlias = list[tuple[str, ast.Module]]


def test_a_name_of_a_type_is_defined_in_one_module(sources: Sources):
    modules: dict[str, list[str]] = {}
    for path, tree in sources:
        for name in public_types(tree):
            modules.setdefault(name, []).append(path)
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}, "rename these types"


def test_no_function_has_many_parameters(sources: Sources):
    found = {
        f"{path}:{function.name}"
        for path, tree in sources
        if not path.startswith((*FORWARD_PASS, COMMAND_LINE))
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and parameters(function) > MOST_PARAMETERS
    }
    assert found - MANY_PARAMETERS == set(), f"more than {MOST_PARAMETERS} parameters: a dataclass is missing"
    assert MANY_PARAMETERS - found == set(), "take those that have few parameters now off the list"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class Job: ...", ["Job"]),
        ("Job = NewType('Job', int)", ["Job"]),
        ("Job = typing.NewType('Job', int)", ["Job"]),
        ("Job: TypeAlias = int", ["Job"]),
        ("Job = tuple[int, str]", ["Job"]),
        ("Job = int | str", ["Job"]),
        ("Job = first.Job", ["Job"]),
        ("class _Job: ...\nLeaf = TypeVar('Leaf')\nJOBS = int | str\nlimit = 3\nJob = Counter('jobs')", []),
    ],
)
def test_types_are_found(source: str, names: list[str]):
    assert list(public_types(ast.parse(source))) == names


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def run(a, /, b, *c, d=1, **e): ...", 5),
        ("def run(self, a): ...", 1),
        ("def run(cls, a): ...", 1),
        ("async def run(): ...", 0),
    ],
)
def test_parameters_are_counted(source: str, count: int):
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    assert parameters(function) == count


@pytest.fixture(scope="module")
def sources() -> Sources:
    """Each module of the package that somebody has written: its path in the package, and its syntax."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if not file.name.endswith("_pb2.py")]
    return [(file.relative_to(PACKAGE).as_posix(), ast.parse(file.read_text())) for file in files]


def public_types(tree: ast.Module) -> Iterator[str]:
    """Names of the classes, new types and aliases of types at the top of a module."""
    for statement in tree.body:
        match statement:
            case ast.ClassDef(name=name):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if "TypeAlias" in ast.unparse(
                annotation
            ):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_type(name, value):
                pass
            case _:
                continue
        if not name.startswith("_"):
            yield name


def is_type(name: str, value: ast.expr) -> bool:
    """Whether an assignment makes a type: by its name, as in ``JobId``, and by what it is given."""
    if not re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name):
        return False
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] == "NewType"
    return isinstance(value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a caller may give."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    bound = bool(positional) and positional[0].arg in ("self", "cls")
    stars = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len(positional) - bound + len(arguments.kwonlyargs) + stars
