"""Imports what a coordinator imports until it serves, and what its application imports while it is built."""

from typing import cast

import spmd_tx.cli.main
import spmd_tx.coordinator.server.serve as serve
from spmd_tx.coordinator.http.app import make_app
from spmd_tx.coordinator.http.services import Services
from spmd_tx.coordinator.text import model_text

__all__ = ["model_text", "serve", "spmd_tx"]

model_text._import_transformers()
make_app(cast(Services, None))
