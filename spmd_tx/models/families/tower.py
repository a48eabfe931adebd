"""Reads the vision tower of a config.json, and how the text model places the tokens of images."""

import math
from dataclasses import replace

from spmd_tx.models.declared.rope import Rope
from spmd_tx.models.declared.tower import CHANNELS, FRAMES, MERGE, PATCH, Tower
from spmd_tx.models.families.keys import MOST_LAYERS, ConfigKeys, Refusal

AXES = 3  # time, row and column


def read_tower(keys: ConfigKeys, d_model: int, *, has_deep: bool = False) -> Tower | None:
    """Return the tower of ``vision_config``; None: the model has none. Raises Refusal.

    ``has_deep``: whether the family's tower makes tokens for the text model's first layers, too.
    """
    vision = keys.within("vision_config")
    if not vision.raw:
        return None
    vision.only(
        patch_size=PATCH,
        temporal_patch_size=FRAMES,
        spatial_merge_size=MERGE,
        in_channels=CHANNELS,
        hidden_act="gelu_pytorch_tanh",
        out_hidden_size=d_model,
    )
    if not has_deep:
        vision.only(deepstack_visual_indexes=[])
    depth, width = vision.count("depth", most=MOST_LAYERS), vision.count("hidden_size")
    heads, positions = vision.count("num_heads"), vision.count("num_position_embeddings")
    if width % heads or width // heads % 4:
        raise Refusal(
            f"has {heads} num_heads for a hidden_size of {width} in its vision_config; the width of a head "
            "must be a multiple of 4"
        )
    side = math.isqrt(positions)
    if side**2 != positions:
        raise vision.wrong("num_position_embeddings", ", which must be the square of an integer")
    deep = _deep(vision, depth) if has_deep else ()
    return Tower(depth, width, vision.count("intermediate_size"), heads, side, d_model, deep)


def with_sections(rope: Rope, text: ConfigKeys, head_width: int) -> Rope:
    """Return the rope with what says which of its pairs time, row and column rotate. Raises Refusal."""
    nested = {**text.within("rope_parameters").raw, **text.within("rope_scaling").raw}
    keys = ConfigKeys(nested, " of its rotary embedding")
    keys.only(mrope_interleaved=True)
    sections, pairs = keys.need("mrope_section"), (rope.width or head_width) // 2
    is_list = isinstance(sections, list) and all(type(each) is int and each >= 0 for each in sections)
    if not is_list or len(sections) != AXES or sum(sections) != pairs:
        raise keys.wrong("mrope_section", f", which must be three integers whose sum is {pairs}")
    return replace(rope, sections=tuple(sections))


def _deep(vision: ConfigKeys, depth: int) -> tuple[int, ...]:
    blocks = vision.need("deepstack_visual_indexes")
    are_blocks = isinstance(blocks, list) and all(type(each) is int and 0 <= each < depth for each in blocks)
    if not are_blocks or blocks != sorted(set(blocks)):
        raise vision.wrong(
            "deepstack_visual_indexes", f", which must be blocks, ascending, of the {depth} that there are"
        )
    return tuple(blocks)
