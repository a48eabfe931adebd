"""Attends to the pages of rows, with kernels or with loops of XLA."""
