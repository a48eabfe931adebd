"""The images of training requests: taken before they are packed, and checked behind that."""

from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.images.seen import RequestImages, SeenImages
from spmd_tx.coordinator.training.batching import PackedRequest
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.coordinator.wire.training_protobuf import ForwardBackwardRequest
from spmd_tx.errors import InvalidRequest


async def see(
    images: RequestImages | None, model: TrainedModel, request: ForwardBackwardRequest
) -> SeenImages | None:
    """Take the images of a request; None: the model takes text alone. Raises InvalidRequest."""
    if images is None:
        return None
    placed = [image for datum in request.data for image in datum.images]
    return await images.take(model.session_id, placed, for_training=True)


def check_room(pool: ImagePool, packed: PackedRequest) -> None:
    """Raise InvalidRequest where a chunk reads more images than devices hold."""
    if not all(pool.fits(chunk.seen) for chunk in packed.chunks):
        raise InvalidRequest(
            f"datums that are computed together have images of more than {pool.rows} tokens; send fewer at "
            "once, or the operator raises --image-tokens"
        )
