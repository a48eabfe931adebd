"""Custom losses as clients upload them: traced graphs, their operations and checks, without JAX."""
