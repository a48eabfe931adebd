"""The few sizes that sampling commands come in; each combination is compiled once. Pure."""

SHORTEST_ROW = 64  # tokens of a prefill row
NARROWEST_TABLE = 4  # pages
GROWTH = 4  # rows come in 1, 4, 16, ...
FEWEST_STEPS = 4  # of a Decode


def power_of_two(least: int, count: int) -> int:
    """The smallest power of two, from ``least`` on, that holds so many."""
    size = least
    while size < count:
        size *= 2
    return size


def power_of_four(count: int) -> int:
    """The smallest of 1, 4, 16, ... that holds so many."""
    size = 1
    while size < count:
        size *= GROWTH
    return size


def decode_steps(least_remaining: int, most: int, is_hurried: bool) -> int:
    """How many tokens a Decode draws per row.

    The row with the fewest tokens left decides, so that it is answered as soon as it is done, and its
    place is free again; longer rows simply go on in the next Decode, which is sent before this one's
    reply is read. A few steps are always taken, because each Decode has a price of its own. Prompts that
    could start at once hurry: they wait for these few steps only.
    """
    fewest = min(FEWEST_STEPS, most)
    return fewest if is_hurried else max(fewest, min(least_remaining, most))
