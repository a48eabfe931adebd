from tests.support.engine_setup import plainly_compiled as plainly_compiled
from tests.support.engine_setup import quickly_compiled as quickly_compiled
