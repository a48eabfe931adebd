"""Processes beside this one, for code that is foreign or large, and what a process keeps from others."""
