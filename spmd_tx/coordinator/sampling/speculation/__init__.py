"""Lossless speculation: texts that are likely to go on like a sample, and what has come of them."""
