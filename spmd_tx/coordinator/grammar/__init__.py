"""Constrained answers: what a conversation demands as a grammar, and how samples follow it."""
