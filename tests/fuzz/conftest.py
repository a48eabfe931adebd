import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuzz.alice import Note
from tests.fuzz.fuzzing import in_peace
from tests.fuzz.option_sets import write_model
from tests.fuzz.served import serving

DATABASES = "SQLite", pytest.param("PostgreSQL", marks=pytest.mark.fuzz)
ROUNDS = 12  # of the bystander


@contextmanager
def new_database(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Of the kind that the parameter of a fixture names. None is the default: SQLite."""
    if request.param == "SQLite":
        yield None
        return
    server = request.getfixturevalue("postgres")
    name = f"fuzz_{secrets.token_hex(4)}"
    server.psql(f"CREATE DATABASE {name};")
    yield server.get_uri(database=name)
    server.psql(f"DROP DATABASE {name} WITH (FORCE);")


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Each test runs on both databases, on a new one each time."""
    with new_database(request) as url:
        yield url


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def peace(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Note]:
    """The bystander's numbers when she is alone; the kind of database does not matter to them."""
    with serving(tmp_path_factory.mktemp("peace") / "run", model_dir, None) as served:
        return in_peace(served, ROUNDS)
