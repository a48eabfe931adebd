"""Compares kernels with their references, on the device, before a worker uses them."""
