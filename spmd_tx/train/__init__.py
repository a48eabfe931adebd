"""Trains from the command line: a thin client over the SDK, of any server of the Tinker API."""
