"""Writes and reads the files of workers: Orbax checkpoints, folders of adapters and of whole models."""
