"""Draws texts for the APIs that answer in text: prompts, samples as they come, and the parts of replies."""
