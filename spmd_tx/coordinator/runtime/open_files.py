"""How many files this process may have open at once, connections of clients among them."""

import resource

MOST = (
    1 << 20
)  # more is of no use, and some programs look at each number up to the limit when they start others


def raise_limit() -> int:
    """Raise the soft limit, which many systems set to 1,024, to the hard one; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
