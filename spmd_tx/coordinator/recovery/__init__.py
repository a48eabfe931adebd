"""Restores models after a loss: which snapshot to start from, and which requests to run again."""
