"""Types and structs that several JSON messages share, and the texts that databases can hold.

``unknown_fields.py`` says which fields beyond those of a message are taken.
"""

from typing import Annotated

import msgspec

MAX_CHARACTERS = 10_000  # of a stored text that quotes a client

Text = Annotated[str, msgspec.Meta(pattern="^[^\\x00]*$")]  # PostgreSQL cannot store NUL
Label = Annotated[str, msgspec.Meta(pattern="^[^\\x00]*$", max_length=1000)]  # stored in rows
ShortLabel = Annotated[str, msgspec.Meta(pattern="^[^\\x00]*$", min_length=1, max_length=200)]
NaturalNumber = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TrainingNumber = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]  # 0 is the creation of the model


class TensorData(msgspec.Struct, frozen=True):
    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class StatusResponse(msgspec.Struct, frozen=True):
    status: str


def storable(text: str) -> str:
    """The text as every database takes it: without NUL and lone surrogates, and of bounded length."""
    cut = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."
    return cut.replace("\0", "\ufffd").encode(errors="replace").decode()
