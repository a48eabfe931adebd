"""Fields that several messages of the wire format share. Unknown fields are ignored."""

from typing import Annotated

import msgspec

Text = Annotated[str, msgspec.Meta(pattern="^[^\\x00]*$")]  # what PostgreSQL can hold


Label = Annotated[str, msgspec.Meta(pattern="^[^\\x00]*$", max_length=1000)]  # kept in rows


Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


TrainingNumber = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]  # 0 is the creation of the model


class TensorData(msgspec.Struct, frozen=True):
    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class StatusResponse(msgspec.Struct, frozen=True):
    status: str
