"""Sets JAX up for the engine's tests. Only their conftests import it: coordinator tests never load JAX."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compiler

from tests.support.quick_compilation import XLA_OPTIONS

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the engine's test time is compilation, and the same programs come back in every run.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[2] / ".cache" / "jax-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """Compile the module's programs quickly.

    For tests that compare within a tolerance, or the bits of one run. Those that prove what is promised of
    the bits of a server's programs compile as a server does.
    """
    get_compile_options = compiler.get_compile_options

    def with_quick_options(*args: Any, env_options_overrides: Any = None, **options: Any) -> Any:
        overrides = {**XLA_OPTIONS, **dict(env_options_overrides or {})}
        return get_compile_options(*args, env_options_overrides=overrides, **options)

    with pytest.MonkeyPatch.context() as patch:
        # JAX has no option of the whole process for these.
        patch.setattr(compiler, "get_compile_options", with_quick_options)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def plainly_compiled() -> Iterator[None]:
    """Compile the module's programs without optimizations, but for XLA's fusion emitters.

    Without these, some arg-maxima of custom losses come out wrong.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
