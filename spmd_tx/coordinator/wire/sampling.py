"""The JSON of sample requests, samplers and sampling sessions. Fields have the names of the SDK."""

from typing import Literal

import msgspec

from spmd_tx.coordinator.wire.fields import NaturalNumber, TensorData
from spmd_tx.images.placed import PlacedImage, image_ids

ChunkKind = Literal["encoded_text", "image", "stored_image", "image_asset_pointer", "dmel", "unknown"]


class ImageRef(msgspec.Struct, frozen=True):
    """Stands for an image in the bodies of the log, which keeps its file beside them."""

    digest: str  # of the file
    tokens: int
    width: int  # pixels, as its header says
    height: int
    size: int  # bytes of the file


class ModelInputChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds a piece of a prompt: exactly one of its contents is set. Old clients send no type."""

    tokens: list[int] | None = None
    data: str | None = None  # an image, base64
    location: str | None = None  # where an image is
    dmel: str | None = None  # audio, base64
    format: str | None = None  # of an image
    expected_tokens: int | None = None  # of an image
    stored: ImageRef | None = None  # only in the log: an image in place of its data

    @property
    def kind(self) -> ChunkKind:
        contents: tuple[tuple[ChunkKind, object], ...] = (
            ("encoded_text", self.tokens),
            ("image", self.data),
            ("stored_image", self.stored),
            ("image_asset_pointer", self.location),
            ("dmel", self.dmel),
        )
        kinds: list[ChunkKind] = [kind for kind, content in contents if content is not None]
        return kinds[0] if len(kinds) == 1 else "unknown"

    @property
    def length(self) -> int:
        """The tokens of text or of a stored image."""
        return len(self.tokens or ()) if self.stored is None else self.stored.tokens


class ModelInput(msgspec.Struct, frozen=True):
    chunks: list[ModelInputChunk]

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The stored images, in their order."""
        placed, first = list[PlacedImage](), 0
        for chunk in self.chunks:
            if chunk.stored is not None:
                placed.append(PlacedImage(first, chunk.stored.tokens, chunk.stored.digest))
            first += chunk.length
        return tuple(placed)

    @property
    def token_ids(self) -> list[int]:
        """All tokens; those of images have negative ids (``image_ids``)."""
        ids = list[int]()
        for chunk in self.chunks:
            stored = chunk.stored
            ids += chunk.tokens or () if stored is None else image_ids(stored.digest, stored.tokens).tolist()
        return ids


class SamplingParams(msgspec.Struct, frozen=True):
    max_tokens: int | None = None  # None: as many as fit in the context
    seed: int | None = None
    stop: str | list[str | int] | None = None  # None: end of text; []: nothing stops but max_tokens
    temperature: float = 1.0  # 0 is greedy
    top_k: int = -1  # -1 is off
    top_p: float = 1.0


class CreateSamplingSessionRequest(msgspec.Struct, frozen=True):
    session_id: str
    sampling_session_seq_id: NaturalNumber
    base_model: str | None = None
    model_path: str | None = None


class CreateSamplingSessionResponse(msgspec.Struct, frozen=True, tag="create_sampling_session"):
    sampling_session_id: str


class SamplerResponse(msgspec.Struct, frozen=True):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class SampleRequest(msgspec.Struct, frozen=True):
    prompt: ModelInput
    sampling_params: SamplingParams = SamplingParams()
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: NaturalNumber | None = None
    base_model: str | None = None  # only from clients without sampling sessions
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int | None = None
    topk_sample_logprobs: int | None = None
    prompt_alt_tokens_k: int | None = None
    target_prompt_logprobs: TensorData | None = None
    record_stability_info: bool | None = None
    # Of the answer, in llguidance's dialect of Lark. The SDK has no such field; other dialects have.
    grammar: str | None = None
