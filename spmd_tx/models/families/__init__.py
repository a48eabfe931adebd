"""Turns a Hugging Face config.json into a declaration, by a function for each family of models."""
