"""Starts, watches and ends one worker process; an agent runs on every host."""
