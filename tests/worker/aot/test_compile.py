"""The programs of a plan, compiled for this host's CPUs in the place of accelerators."""

import threading
import time
from dataclasses import replace

import jax.numpy as jnp
import pytest

from spmd_tx.hlo.cost import Cost, DeviceOperation
from spmd_tx.models.families.registry import declare
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.aot.compile import compile_programs, copies, per_step, programs_of, state_arrays
from spmd_tx.worker.aot.programs import AHEAD_ROWS, wanted
from spmd_tx.worker.aot.roofline import Speeds
from spmd_tx.worker.aot.target import CompileTarget
from spmd_tx.worker.memory.plan import Plan, UsableMemory
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import Sizes
from tests.golden import families, vision_cases
from tests.support.model_shapes import resized
from tests.support.tiny_engine import MIXTURE, MODEL
from tests.support.tiny_setup import tiny_setup

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SPEEDS = Speeds(flops=1e12, bandwidth=1e11, links=1e10, network=1e9)


def planned(model=MODEL, mesh=(2, 1, 2), **different) -> Plan:
    fsdp, ep, tp = mesh
    setup = tiny_setup(fsdp=fsdp, ep=ep, tp=tp, dtype="float32", **different)
    sizes = Sizes(setup, model, make_mesh(*mesh), jnp.float32)
    return make_plan(sizes, UsableMemory(2**28, "tpu"))


def target(plan: Plan) -> CompileTarget:
    mesh = plan.sizes.mesh
    return CompileTarget(mesh, [0] * mesh.size, SPEEDS, SPEEDS)  # pyright: ignore[reportArgumentType]


def reports(plan: Plan, *only: str, hlo=None):
    programs = programs_of(plan, target(plan).mesh, only)
    return {
        each.name: each for each in compile_programs(plan, target(plan), programs, lambda message: None, hlo)
    }


@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "mixture"])
def test_all_kinds_of_programs_are_compiled_once(model):
    plan = planned(model)
    mesh = target(plan).mesh
    programs = programs_of(plan, mesh)
    names = [each.name for each in programs]
    assert len(names) == len(set(names)) == len({each.call.key for each in programs})
    assert {each.wanted.kind for each in programs} == {
        *("train", "forward", "prefill", "decode", "optim_step", "other")
    }
    for beginning in ("copy_pages", "continued prefill", "to_bank", "swap_out", "swap_in", "create_adapter"):
        assert any(name.startswith(beginning) for name in names), beginning


def test_images_are_encoded_by_programs_of_a_plan_that_has_room_for_them():
    model = declare(vision_cases.CONFIGS["qwen3_vl"])
    found = [
        each for each in wanted(planned(model, image_tokens=512, max_context=512)) if each.kind == "encode"
    ]
    assert [each.name for each in found] == ["encode 1024"]
    assert found[0].planned == planned(model, image_tokens=512, max_context=512).steps.encode(1024)
    assert not [each for each in wanted(planned(model)) if each.kind == "encode"]


@pytest.fixture
def makes_drafts():
    return declare(families.CONFIGS["glm4_moe"] | {"num_nextn_predict_layers": 1}, drafts=True)


def test_a_decode_that_speculates_is_wanted_where_the_model_makes_drafts(makes_drafts):
    for model, expected in (
        (makes_drafts, [f"speculative decode {AHEAD_ROWS} of 1"]),
        (replace(makes_drafts, mtp=None), []),
    ):
        found = wanted(planned(model, decode_rows=AHEAD_ROWS))
        assert [each.name for each in found if each.name.startswith("speculative")] == expected


@pytest.mark.slow
def test_a_decode_that_speculates_computes_drafts(makes_drafts):
    plan = planned(makes_drafts, decode_rows=AHEAD_ROWS)
    found = reports(plan, "decode", "speculative decode")
    ahead = found[f"speculative decode {AHEAD_ROWS} of 1"]
    assert ahead.error is None
    assert ahead.memory_bytes > 0
    assert found[f"decode {AHEAD_ROWS} of 1"].flops < 0.8 * ahead.flops, "it writes to its pages, and no more"


def test_each_step_is_predicted_from_one_program():
    usual = [each.kind for each in wanted(planned()) if each.is_usual]
    assert sorted(usual) == ["decode", "forward", "optim_step", "prefill", "train"]


def test_a_program_is_reported(tmp_path):
    plan = planned(longest_row=64)
    found = reports(plan, "decode", "train", hlo=tmp_path)
    decode = next(each for name, each in found.items() if name.startswith("decode"))
    assert decode.error is None
    assert decode.memory_bytes > 0
    assert decode.planned_bytes is not None
    assert decode.tokens == plan.decode_rows * 2
    assert {each.name for each in decode.collectives} >= {"all-reduce"}
    assert all(each.devices in (2, 4) for each in decode.collectives)
    model = plan.sizes.model
    # Each device multiplies its rows with its half of the weights, and of the vocabulary.
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    layer = model.d_model * (2 * heads + 2 * kv_heads + 3 * model.d_ff)
    weights = (model.n_layers * layer + model.d_model * model.vocab_size) / 2
    assert decode.flops > 2 * plan.decode_rows * weights
    assert decode.flops < 6 * 2 * plan.decode_rows * weights, "of one step, not of all"
    assert 0 < decode.roofline_seconds <= decode.expected_seconds
    assert len([*tmp_path.glob("*.hlo")]) == len(found)
    train = next(each for name, each in found.items() if name.startswith("train"))
    assert train.flops > 2 * 2 * train.tokens / 2 * weights


def test_a_program_that_cannot_be_compiled_is_reported_and_the_others_go_on(monkeypatch):
    plan = planned()
    programs = programs_of(plan, target(plan).mesh, ["optim_step", "swap_out"])

    class Broken:
        def lower(self, *arguments):
            raise RuntimeError("RESOURCE_EXHAUSTED:\n  too large")

    broken = replace(programs[0], call=replace(programs[0].call, step=Broken()))
    first, second = compile_programs(plan, target(plan), [broken, programs[1]], lambda message: None)
    assert first.error == "RuntimeError: RESOURCE_EXHAUSTED: too large"
    assert second.error is None


def test_what_takes_too_long_is_reported_as_late_and_left_to_itself():
    plan = planned()
    programs = programs_of(plan, target(plan).mesh, ["optim_step", "swap_out"])
    ends = threading.Event()

    class Slow:
        def lower(self, *arguments):
            return self

        def compile(self, compiler_options):
            ends.wait()

    slow = replace(programs[0], call=replace(programs[0].call, step=Slow()))
    until = time.monotonic() + 1  # enough to begin the first on a busy machine
    said: list[str] = []
    found = [*compile_programs(plan, target(plan), [slow, programs[1]], said.append, until=until)]
    ends.set()
    assert [each.is_late for each in found] == [True, True]
    assert not any(each.has_figures for each in found)
    assert said == [f"compiling {programs[0].name} (1 of 2)"], "the second was not begun"


def cost(*operations: DeviceOperation, **different) -> Cost:
    return Cost(operations, **different)


def operation(written=(), times=1.0, **different) -> DeviceOperation:
    return DeviceOperation(
        name="x", op="copy", type="", source="", times=times, written=tuple(written), **different
    )


def test_steps_of_a_decode_are_counted_apart():
    whole = cost(operation(flops=8.0), turns=4)
    assert per_step(whole, "decode").flops == 2
    assert per_step(whole, "train").flops == 8
    assert per_step(cost(operation(flops=8.0)), "decode").flops == 8


def test_copies_of_the_cache_and_of_stacked_weights_are_found(monkeypatch):
    monkeypatch.setattr("spmd_tx.worker.aot.compile.LARGE", 1)
    plan = planned(resized(MODEL, d_ff=96))  # so that no two weights have the same dimensions
    arrays = state_arrays(plan, target(plan).mesh)
    model, pages = plan.sizes.model, plan.pages
    pool = (model.n_layers, pages, plan.sizes.setup.page_size, model.n_kv_heads // 2, model.head_dim)
    gate = (model.n_layers, model.d_model, model.d_ff // 2)
    transposed = (gate[0], gate[2], gate[1])
    found = copies(
        cost(
            operation([("f32", pool)], times=3),
            operation([("f32", transposed)]),
            operation([("f32", gate[1:])], times=2, given=(("f32", gate), ("s32", ()))),
            operation(
                [("f32", gate[1:])], times=7, given=(("f32", gate[1:]),)
            ),  # activations of the same size
            operation([("f32", (5, 7, 11))]),
        ),
        arrays,
    )
    told = {each.array: (each.count, each.bytes) for each in found}
    assert {"cache.keys", "base.layers.gate", "one layer of base.layers.gate"} <= told.keys()
    assert told["cache.keys"][0] == 3
    assert told["one layer of base.layers.gate"][0] == 2
    assert told["base.layers.gate"] == (1, 4 * gate[0] * gate[1] * gate[2])
    assert len(told) == 3
