"""Applies LoRA adapters: many at once, in training and in decode, and adds up their gradients."""
