from tests import engine_setup  # noqa: F401
