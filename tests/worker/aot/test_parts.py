"""Which part of the model an operation belongs to."""

import jax
import jax.numpy as jnp
import pytest

from spmd_tx.hlo.cost import Cost, cost_of
from spmd_tx.hlo.frames import Frame, Frames, frames_of
from spmd_tx.models.layers import rms_norm
from spmd_tx.worker.aot.parts import BETWEEN_DEVICES, OTHER, part_of, seconds_by_part
from spmd_tx.worker.aot.roofline import Speeds
from tests.worker.aot.test_roofline import gather, operation

SPEEDS = Speeds(flops=100.0, bandwidth=10.0, links=4.0, network=1.0)


def frames(*stack: tuple[str, str]) -> Frames:
    """Frame 1 is the innermost."""
    places = {
        number: Frame(f"/here/spmd_tx/{file}", function) for number, (file, function) in enumerate(stack, 1)
    }
    return Frames(places, {number: (number, number + 1) for number in places})


@pytest.mark.parametrize(
    "stack, part",
    [
        (
            [
                ("models/adapters/row_lora.py", "row_lora.<locals>.apply"),
                ("models/feed_forward.py", "feed_forward"),
            ],
            "adapters",
        ),
        ([("models/layers.py", "rms_norm"), ("models/backbone.py", "attention")], "maps of attention"),
        ([("models/backbone.py", "attention.<locals>.heads")], "maps of attention"),
        (
            [("models/attention/blockwise.py", "attend_segments"), ("models/backbone.py", "attention")],
            "attention",
        ),
        (
            [("models/layer_pass.py", "LayerPass.linear"), ("models/feed_forward.py", "feed_forward")],
            "feed-forward",
        ),
        ([("models/experts/grouped.py", "_run"), ("models/experts/moe.py", "mixture")], "experts"),
        ([("sharding/collectives.py", "linear"), ("models/head.py", "logits")], "head"),
        ([("worker/steps/sample.py", "make_decode")], OTHER),
        ([], OTHER),
    ],
)
def test_the_innermost_function_with_a_rule_decides(stack, part):
    assert part_of(operation(frame=1), frames(*stack)) == part


def test_what_is_sent_between_devices_is_a_part_of_its_own():
    stack = frames(("models/head.py", "logits"))
    assert part_of(gather(((0, 1),)), stack) == BETWEEN_DEVICES
    cost = Cost((gather(((0, 1),)), operation(times=3, flops=200.0, frame=1)))
    assert seconds_by_part(cost, stack, SPEEDS, [0, 0]) == {"head": 6.0, BETWEEN_DEVICES: 0.5 * 8 / 4}


def test_the_stack_of_an_operation_is_read_from_its_program():
    def attention(x, w):
        return jnp.tanh(rms_norm(x @ x, w, 1e-6))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (8,))]
    text = jax.jit(attention).lower(*shapes).compile().as_text()
    assert text is not None
    found = frames_of(text)
    functions = [
        [frame.function for frame in found.of(each.frame)] for each in cost_of(text).operations if each.frame
    ]
    here = test_the_stack_of_an_operation_is_read_from_its_program.__name__
    assert functions, "the text has its frames"
    assert all(any(name.startswith(here) for name in names) for names in functions)


def test_a_text_without_frames_has_none():
    assert not list(frames_of("HloModule text\n").of(1))
