"""Checkpoints and snapshots: their folders, local and remote stores, and their rows."""
