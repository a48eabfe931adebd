"""The names of the optimizers, for what starts without NumPy."""

from typing import Literal

OptimizerName = Literal["adamw", "dimuon"]
