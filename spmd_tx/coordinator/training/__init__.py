"""Turns training requests into steps, and replies into outcomes: lines, packing, batching, losses."""
