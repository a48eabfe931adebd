from collections.abc import Iterator

import pytest

from tests.chaos.outcome import Outcome, table
from tests.chaos.postgres import Postgres


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[Postgres | None]:
    if request.param == "SQLite":
        yield None
        return
    postgres = Postgres()
    yield postgres
    postgres.close()


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[Outcome]]:
    """Collect the outcomes of all runs, and print them at the end."""
    found: list[Outcome] = []
    yield found
    print("\n" + table(found))
