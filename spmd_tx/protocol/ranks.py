"""Calculates ranks of adapters' factors, for the command line, too, which imports no arrays."""


def expert_rank(rank: int, experts_per_token: int) -> int:
    """Return the rank of each expert's factors in an adapter of a mixture of experts."""
    return max(1, rank // experts_per_token)
