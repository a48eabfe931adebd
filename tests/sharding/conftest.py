from tests.support import engine_setup  # noqa: F401
