"""Lossless speculation: what is likely to follow a sample, and how many rows of a Decode read it ahead."""
