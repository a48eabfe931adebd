"""What the authors of programs tell readers of their HLO, as names of scopes in which operations are traced.

A loop whose end depends on data says how often it usually runs, a condition that it is usually false, and a
kernel what it costs: Pallas keeps its cost estimate for TPUs only. It also says when that estimate counts
each of its arrays, of which some may stay on the chip.
"""

import re

TURNS = re.compile(r"usually_(\d+)_turns\)*/while$")
USUALLY_FALSE = "usually_false"  # the name of the scope in which such a lax.cond must be traced
# JAX writes names of transformations around that of a scope: transpose(jvp(costs_...))
OF_KERNEL = r"\)*/(?:[\w.\-]+/)?(?:pallas_call|mpmd_map)$"
COST = re.compile(r"costs_(\d+)_flops_(\d+)_bytes" + OF_KERNEL)
# The name of the scope in which a kernel must be traced whose estimate counts all of each array that it is
# given or returns, but for those in main memory of which it fetches parts
COUNTS_ARRAYS = "counts_arrays"
ALL_COUNTED = re.compile(rf"\b{COUNTS_ARRAYS}{OF_KERNEL}")


def usual_turns(turns: int) -> str:
    """Return the name of the scope in which such a loop must be traced."""
    return f"usually_{turns}_turns"


def told_turns(source: str) -> int | None:
    """Return the usual number of turns of a loop, from the name of its operation in the traced program."""
    match = TURNS.search(source)
    return int(match[1]) if match else None


def is_usually_false(source: str) -> bool:
    """Say whether the condition of a lax.cond usually does not hold, from the name of its operation."""
    return re.search(rf"\b{USUALLY_FALSE}\)*/cond$", source) is not None


def costs(flops: int, moved: int) -> str:
    """Return the name of the scope in which a kernel of so many operations and bytes must be called."""
    return f"costs_{flops}_flops_{moved}_bytes"


def told_cost(source: str) -> dict[str, float]:
    """Return flops and bytes_accessed of a kernel; empty if nobody tells."""
    match = COST.search(source)
    return {"flops": float(match[1]), "bytes_accessed": float(match[2])} if match else {}


def counts_arrays(source: str) -> bool:
    """Say whether a kernel's estimate counts each of its arrays, from the name of its operation."""
    return ALL_COUNTED.search(source) is not None
