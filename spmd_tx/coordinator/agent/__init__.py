"""Runs on every host: starts one worker process, watches it and ends it."""
