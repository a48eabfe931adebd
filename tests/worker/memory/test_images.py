"""How many tokens of images devices hold where that is left to the server."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import pytest
from jax.sharding import PartitionSpec as P

from spmd_tx.errors import DoesNotFit
from spmd_tx.models.declared.tower import Tower
from spmd_tx.models.families.registry import declare
from spmd_tx.models.vision.tower_weights import tower_weights
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import abstract_mesh
from spmd_tx.sharding.weight import specs
from spmd_tx.worker.memory.plan import UsableMemory, report
from spmd_tx.worker.memory.planner import best_plan
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import Sizes
from tests.golden import vision_cases
from tests.golden.vision_cases import D_MODEL
from tests.support.tiny_engine import MODEL
from tests.support.tiny_setup import tiny_setup

MEMORY = UsableMemory(2**30, "tpu")
SEES = declare(vision_cases.CONFIGS["qwen3_5"])


def sizes(mesh=(1, 1, 1), model=SEES, **different) -> Sizes:
    fsdp, ep, tp = mesh
    usual = {"image_tokens": None, "kernels": Kernels("tpu"), "page_size": 8}
    return Sizes(
        tiny_setup(fsdp=fsdp, ep=ep, tp=tp, **usual | different), model, abstract_mesh(*mesh), jnp.float32
    )


@pytest.mark.parametrize(
    "mesh, options, tokens",
    [
        ((1, 1, 1), {}, 8192),  # of the largest micro-batch
        ((1, 1, 1), {"kernels": Kernels("cpu")}, 4096),
        ((2, 2, 2), {}, 4 * 8192),
        ((2, 1, 1), {"train_tokens": 512}, 2 * 1024),  # no less than a prompt's part of each shard
        ((2, 1, 1), {"role": "sample"}, 2 * 1024),
        ((64, 1, 1), {}, 34 << 10),
        ((1, 1, 1), {"train_tokens": 512, "max_context": 4096}, 4096),  # of the largest image
        ((1, 1, 1), {"train_tokens": 512, "max_context": 1 << 17}, 16384),
        ((2, 1, 1), {"image_tokens": 300}, 300),
        ((2, 1, 1), {"image_tokens": 0}, 0),
    ],
)
def test_a_model_that_sees_has_room_for_the_images_of_a_micro_batch(mesh, options, tokens):
    assert sizes(mesh, **options).image_tokens == tokens


def test_deep_layers_have_their_part_of_the_most_that_is_held():
    deep = Tower(depth=4, width=32, inner=64, heads=2, side=8, out=D_MODEL, deep=(0, 1, 2))
    assert sizes((64, 1, 1), replace(SEES, tower=deep)).image_tokens == (34 << 10) // 4


def test_a_model_that_does_not_see_holds_nothing_of_images():
    text = sizes(model=MODEL)
    assert text.image_tokens == text.of_images == 0
    plan = make_plan(text, UsableMemory(2**28, "tpu"))
    without = replace(text, setup=msgspec.structs.replace(text.setup, image_tokens=0))
    assert report(plan) == report(make_plan(without, UsableMemory(2**28, "tpu")))


def test_the_largest_image_that_is_planned_for_is_the_largest_that_is_taken():
    assert (
        sizes(max_context=1 << 17, image_tokens=8192).most_patches == 4 * 8192
    )  # what the pool has room for
    assert sizes((8, 1, 1), max_context=1 << 17).most_patches == 4 * 16384
    assert sizes((8, 1, 1), max_context=1 << 17, image_tokens_each=1000).most_patches == 4096


def test_taking_text_alone_is_proposed_where_it_makes_a_model_fit():
    server = sizes((8, 1, 1))
    blind = replace(server, setup=msgspec.structs.replace(server.setup, image_tokens=0))
    least = next(size for size in range(2**20, 2**30, 2**20) if _fits(blind, size))
    with pytest.raises(DoesNotFit, match=r"and tokens of images.*would make it fit:.*--image-tokens 0"):
        make_plan(server, UsableMemory(least, "tpu"))


def _fits(server: Sizes, size: int) -> bool:
    return best_plan(server, UsableMemory(size, "tpu")) is not None


def test_devices_share_the_towers_matrices():
    alone, eight = sizes((1, 1, 1)), sizes((2, 2, 2))
    whole, part = (report(best_plan(each, MEMORY)).tower_bytes for each in (alone, eight))
    assert whole / 8 < part < whole / 7, "vectors are whole on each"
    tower = Tower(depth=4, width=32, inner=64, heads=2, side=8, out=64)
    of_seven = jax.tree.leaves(specs(tower_weights(tower, jnp.float32, devices=7)))
    assert set(of_seven) == {P()}, "no dimension is a multiple of it"


def test_kernels_hold_no_scores():
    usual = {"image_tokens": 4096, "max_context": 4096}
    plans = [
        best_plan(sizes(**usual, kernels=Kernels("tpu", images=images)), MEMORY)
        for images in ("reference", "mosaic")
    ]
    scores = 4 * 2 * SEES.tower.heads * 2**21
    assert plans[0].steps.encode(4096) - plans[1].steps.encode(4096) > scores
