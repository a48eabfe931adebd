"""Types of fields that the APIs that answer in text have in common."""

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1)]
Temperature = Annotated[float, Meta(ge=0)]  # 0 is greedy
TopProbability = Annotated[float, Meta(gt=0, le=1)]
TopCount = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1 and 0 are off
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
