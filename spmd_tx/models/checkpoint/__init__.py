"""Reads Hugging Face checkpoints of base models: their files, tensors and encodings."""
