"""Compiles the programs of the steps, counts compilations, and knows how each is called."""
