"""The images of training requests: taken before they are packed, and checked behind that."""

from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.images.seen import RequestImages, SeenImages
from spmd_tx.coordinator.training.batching import PackedRequest
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.coordinator.training.packing import TrainingShapes
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


def with_room(shapes: TrainingShapes, seen: SeenImages | None, pool: ImagePool) -> TrainingShapes:
    """Return the shapes with which these images are read, as many at a time as devices hold."""
    return shapes if seen is None else shapes.holding(sum(image.tokens for image in seen.values()), pool.rows)


def check_room(pool: ImagePool, packed: PackedRequest) -> None:
    """Raise InvalidRequest where a row, which cannot be cut, reads more images than devices hold."""
    for chunk in packed.chunks:
        if not pool.fits(chunk.seen):
            tokens = sum({image.key: image.tokens for image in chunk.seen}.values())
            raise InvalidRequest(
                f"datums that are computed together have images of {tokens} tokens; this server holds "
                f"{pool.rows} at a time. Send datums with fewer or smaller images, one by one if they are "
                "short, or let the operator raise --image-tokens"
            )
