"""Raises the limit on files that this process may have open at once, connections of clients included."""

import resource

# More is of no use, and some programs walk through all numbers up to the limit when they start others.
MAX_FILES = 1 << 20


def raise_limit() -> int:
    """Raise the soft limit, which many systems set to 1,024, to the hard one. The result is the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return MAX_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
