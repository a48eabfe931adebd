"""Compiles a worker's programs for devices that are not there, and predicts how fast they would run."""
