import gc
import os
import sys

from hypothesis import settings

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
    """Let the garbage collector pass over what lives to the end: modules and thousands of tests."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


pytest_plugins = ["tests.support.databases", "tests.support.disks", "tests.support.distribution"]
