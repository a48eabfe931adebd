"""Declares models as data, without JAX: linear maps, layers and stacks."""
