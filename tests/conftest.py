import functools
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from tokenizers import Tokenizer

from tests.support.type_checks import check_annotated_modules

check_annotated_modules()

# On a busy machine any example may take long.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")

# A test must not depend on the shell it runs in: options of the server also come from these variables.
for name in [name for name in os.environ if name.startswith(("SPMD_TX_", "TINKER_"))]:
    del os.environ[name]

# Modules and tests that are being collected live to the end.
gc.disable()

# Tests start hundreds of processes, and each would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over thousands of tests."""
    _collect_and_freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect clients of the SDK behind their tests: their threads would go on in those of others."""
    module = getattr(item, "module", None)
    if module not in (None, getattr(nextitem, "module", None)) and _uses_the_sdk(module):
        _let_go_of_kept_clients()
        _collect_and_freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Leave nothing to be passed over for the five collections in which pytest looks for lost exceptions."""
    _collect_and_freeze()


def _collect_and_freeze() -> None:
    """What is left lives to the end: modules, tests, traced programs and other caches."""
    gc.collect()
    gc.freeze()


def _let_go_of_kept_clients() -> None:
    """Make the SDK forget clients without a session, which it keeps to the end of the process."""
    holders = sys.modules.get("tinker.lib.internal_client_holder")
    cache = getattr(holders, "sessionless_holder_cache", None)  # older versions have none
    if cache is not None:
        cache._holders.clear()


def _uses_the_sdk(module: object) -> bool:
    """Whether a module of tests has anything of the SDK, or of its tests."""
    origins = (
        getattr(value, "__module__", getattr(value, "__name__", "")) for value in vars(module).values()
    )
    return any(str(origin).startswith(("tinker", "tests.sdk")) for origin in origins)


@pytest.fixture(scope="session", autouse=True)
def tokenizers_are_trained_once() -> Iterator[None]:
    """Train one tokenizer for all tiny models that want the same: it takes most of their time."""
    from spmd_tx.demo import tiny_model  # not before its types can be checked

    train = tiny_model.train_tokenizer

    @functools.cache
    def trained(*arguments: Any, **named: Any) -> str:
        return train(*arguments, **named).to_str()

    @functools.wraps(train)
    def train_once(*arguments: Any, **named: Any) -> Tokenizer:
        return Tokenizer.from_str(trained(*arguments, **named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "train_tokenizer", train_once)
        yield


pytest_plugins = [
    "tests.support.databases",
    "tests.support.disks",
    "tests.support.distribution",
    "tests.sdk.shared_servers",
]
