"""Sets JAX up for the engine's tests. Only their conftests import it: coordinator tests never load JAX."""

from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the engine's test time is compilation, and the same programs come back in every run.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[2] / ".cache" / "jax-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
