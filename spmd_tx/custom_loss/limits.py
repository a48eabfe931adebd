"""What one request with a custom loss may take, as workers are told: bounds.py says what each is for."""

import msgspec


class LossLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request. What is run again, because it was accepted and has a result, has none."""

    operations_per_datum: float  # of arithmetic, as loss_values.py counts them
    operations: float
    programs: int  # that its datums are compiled into
    compile_seconds: float
    run_seconds: float
