"""Turns conversations and texts into tokens, within limits on time and memory."""
