"""Stores checkpoints and snapshots: folders on disk, remote stores, and their rows."""
