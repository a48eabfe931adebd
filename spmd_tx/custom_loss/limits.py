"""The limits of one request with a custom loss, as workers get them. spmd_tx/bounds.py explains each."""

import msgspec


class LossLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits one request. A request that has a result already is run again without limits."""

    operations_per_datum: float  # arithmetic operations, as worker/custom_loss/values.py counts them
    operations: float
    programs: int  # into which the request's datums are compiled
    compile_seconds: float
    run_seconds: float
