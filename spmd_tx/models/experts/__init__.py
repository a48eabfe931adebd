"""Computes the experts of a mixture for the tokens that chose them, and for no others."""
