"""Names and shapes of the arrays in a training checkpoint, as its file system has them."""

from collections.abc import Iterator

from spmd_tx.models.declared.layers import LayerArray
from spmd_tx.models.declared.maps import Map
from spmd_tx.models.declared.model import FACTORS, HEAD, Model

ArrayShape = tuple[int, ...]
RANK = -2  # the dimension of a factor that differs between servers, since some pad it


def of_adapter(model: Model, rank: int) -> Iterator[tuple[str, ArrayShape]]:
    """Yield those of an adapter's factors; a server pads the rank of some."""
    for name, each in model.adapted.items():
        at = "head" if name == HEAD else f"layers.{name}"
        for factor, width in zip(FACTORS, (each.map.width_in, each.map.width_out), strict=True):
            yield f"w.{at}.{factor}", (*each.lead(factor), rank, width)


def of_model(model: Model) -> Iterator[tuple[str, ArrayShape]]:
    """Yield those of all weights."""
    table = model.vocab_size, model.d_model
    yield "w.embed", table
    yield "w.final_norm", (model.d_model,)
    if not model.is_tied:
        yield "w.head", table
    for place in model.places:
        for array in model.arrays(place):
            yield f"w.layers.{place.name(array.name)}", (len(place.numbers), *_shape(array))


def _shape(array: LayerArray) -> ArrayShape:
    if not isinstance(array, Map):
        return array.shape
    return (*((array.experts,) if array.experts else ()), array.width_in, array.width_out)
