from tests.support.engine_setup import quickly_compiled as quickly_compiled
