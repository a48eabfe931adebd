"""Imports what a coordinator imports until it serves."""

import spmd_tx.cli.main
import spmd_tx.coordinator.server.serve as serve
from spmd_tx.coordinator.text import model_text

__all__ = ["model_text", "serve", "spmd_tx"]

model_text._import_transformers()
