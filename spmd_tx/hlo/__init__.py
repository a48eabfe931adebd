"""Reads what a program computes, moves and sends from the text of its optimized HLO."""
