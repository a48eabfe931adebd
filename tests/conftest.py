import os

# A test must not depend on the shell it runs in: options of the server also come from these variables.
for name in [name for name in os.environ if name.startswith(("SPMD_TX_", "TINKER_"))]:
    del os.environ[name]

pytest_plugins = ["tests.support.databases", "tests.support.disks"]
