import pytest

from tests.coordinator.scheduler.fake_sampling import FakeSampling
from tests.coordinator.training.bench import running


@pytest.fixture
def sampling():
    return FakeSampling()


@pytest.fixture
async def bench(tmp_path, sampling):
    async with running(tmp_path, slots=3, sampling=sampling) as bench:
        yield bench
