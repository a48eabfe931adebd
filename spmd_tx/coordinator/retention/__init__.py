"""Deletes what is no longer needed, and makes backups."""
