"""Runs one coordinator process: checks the machine, builds the parts, serves, drains and exits."""
