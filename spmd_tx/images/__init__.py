"""Images before a model sees them: headers, numbers of tokens, patches and positions, without JAX."""
