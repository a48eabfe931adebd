import tests.support.engine_setup  # noqa: F401
