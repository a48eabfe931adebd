"""Custom losses as clients trace them: what a graph may hold, and the checks of it. Knows no JAX."""
