import pytest

from tests.coordinator.training.bench import running


@pytest.fixture
async def bench(tmp_path):
    async with running(tmp_path, slots=3) as bench:
        yield bench
