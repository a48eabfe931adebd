"""Custom losses as clients upload them: traced graphs, the operations allowed, and their checks, without JAX."""
