"""Attention: over packed rows, over pages of keys and values, within windows; latent attention; positions."""
