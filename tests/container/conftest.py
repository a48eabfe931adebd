import shutil

import pytest

from tests.container.rootless import NEEDED, User, rootless


@pytest.fixture(scope="session")
def user():
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    with rootless() as user:
        yield user


@pytest.fixture(scope="session")
def base(user: User, tmp_path_factory):
    with user.base(tmp_path_factory.mktemp("base")) as base:
        yield base
