"""What fits, what is chosen, and what is refused with which words. Nothing is compiled here."""

import re
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from spmd_tx.errors import StartError
from spmd_tx.models.declared.encoding import BASE_DTYPES
from spmd_tx.models.families.registry import declare
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.protocol.memory_plan import choices, rows
from spmd_tx.sharding.mesh import abstract_mesh
from spmd_tx.worker.memory.plan import UsableMemory, report
from spmd_tx.worker.memory.planner import best_plan
from spmd_tx.worker.memory.refusal import _remedies, make_plan
from spmd_tx.worker.memory.sizes import Sizes
from spmd_tx.worker.memory.speed import cost_of_token
from spmd_tx.worker.memory.steps import LEVELS
from tests.support import encoded_models
from tests.support.known_models import CONFIGS
from tests.support.model_shapes import QWEN3_8B, QWEN3_30B_A3B
from tests.support.tiny_engine import MIXTURE, MODEL
from tests.support.tiny_setup import tiny_setup

GIB = 2**30


def sizes(model=QWEN3_8B, mesh=(1, 1, 1), **different) -> Sizes:
    """A server with default options."""
    fsdp, ep, tp = mesh
    usual = {
        "adapter_slots": 8,
        "bank_slots": 10,
        "max_rank": 32,
        "max_context": 8192,
        "page_size": 16,
        "decode_rows": 64,
        "decode_steps": 16,
    }
    setup = tiny_setup(fsdp=fsdp, ep=ep, tp=tp, **usual | different)
    return Sizes(setup, model, abstract_mesh(*mesh), jnp.bfloat16)


def test_the_layer_that_makes_drafts_is_counted():
    raw = CONFIGS["zai-org/GLM-4.5-Air"] | {"num_nextn_predict_layers": 1}
    without, with_it = (sizes(declare(raw, drafts=drafts)) for drafts in (False, True))
    deeper = sizes(declare(raw | {"num_hidden_layers": raw["num_hidden_layers"] + 1}))
    width = raw["hidden_size"]
    joins = 2 * width**2 + 3 * width  # the map of hidden state and embedding, and three norms
    assert with_it.whole_base == deeper.whole_base + 2 * joins > without.whole_base
    assert with_it.page == deeper.page > without.page
    assert without.draft_cost == 0.0 < with_it.draft_cost < 0.1
    assert with_it.bank == without.bank


def changed(before: Sizes, **different) -> Sizes:
    return replace(before, setup=msgspec.structs.replace(before.setup, **different))


def gib(count: float) -> UsableMemory:
    return UsableMemory(int(count * GIB), "tpu")


def least_memory(sizes: Sizes) -> float:
    """GiB with which it just fits."""
    fits, too_small = 64.0, 0.0
    while fits - too_small > 0.25:
        middle = (fits + too_small) / 2
        if best_plan(sizes, gib(middle)) is None:
            too_small = middle
        else:
            fits = middle
    return fits


def test_the_parts_add_up_to_the_memory():
    plan = make_plan(sizes(), gib(120))
    told = report(plan)
    parts = (told.base_bytes, told.adapter_bytes, told.bank_bytes, told.cache_bytes, told.step_bytes)
    assert sum(parts) == told.device_bytes == 120 * GIB
    assert told.base_bytes == 2 * 8_190_735_360  # the parameters of Qwen3-8B
    assert max(told.step_needs.values()) <= told.step_bytes


def test_where_compiling_tries_kernels_it_has_memory_of_its_own():
    """Beside a step: enough for the operands of the head, and twice for the logits of a chunk."""
    server = sizes()
    without, beside = (make_plan(server, replace(gib(120), platform=each)) for each in ("tpu", "gpu"))
    logits, head = 1024 * 151936 * 4, 151936 * 4096 * 2
    assert report(without).compiling_bytes == 0
    assert report(beside).compiling_bytes >= head + 2 * logits
    taken = without.cache + without.room - beside.cache - beside.room
    assert taken == report(beside).compiling_bytes
    assert all(needed <= beside.room for _, needed in beside.worst().values())


def test_what_a_device_holds_shrinks_with_the_mesh():
    one, eight = (make_plan(sizes(mesh=mesh), gib(120)) for mesh in ((1, 1, 1), (1, 1, 8)))
    assert one.base / 8 <= eight.base < one.base / 7
    assert eight.cache_tokens > 4 * one.cache_tokens
    zero = make_plan(sizes(mesh=(8, 1, 1)), gib(120))
    assert zero.sizes.adapters < one.sizes.adapters / 7


MEMORIES = (24, 32, 40, 52, 72, 92, 134, 184)  # GiB
CONTEXTS = (1024, 2048, 8192, 40960)
FEW = slice(None, None, 3)  # of either


def costs(model, mesh, attention, some: slice) -> np.ndarray:
    """The cost of a token by memory and context; infinite where nothing fits."""
    found = np.full((len(MEMORIES[some]), len(CONTEXTS[some])), np.inf)
    for column, context in enumerate(CONTEXTS[some]):
        server = sizes(model, mesh, max_context=context, kernels=Kernels(rows=attention))
        for row, memory in enumerate(MEMORIES[some]):
            plan = best_plan(server, gib(memory))
            if plan is not None:
                found[row, column] = cost_of_token(plan)
    return found


@pytest.mark.parametrize(
    "model, mesh, attention, some",
    [
        pytest.param(QWEN3_8B, (1, 1, 1), "reference", FEW, id="8B"),
        pytest.param(QWEN3_30B_A3B, (1, 8, 1), "triton", FEW, id="30B-A3B on ep 8"),
        *(
            pytest.param(model, mesh, attention, slice(None), marks=pytest.mark.slow)
            for model, mesh, attention in (
                (QWEN3_8B, (1, 1, 1), "reference"),
                (QWEN3_30B_A3B, (1, 8, 1), "triton"),
                (QWEN3_8B, (1, 1, 1), "triton"),
                (QWEN3_8B, (8, 1, 1), "reference"),
                (QWEN3_8B, (8, 1, 1), "triton"),
                (QWEN3_8B, (2, 1, 4), "reference"),
                (QWEN3_8B, (2, 1, 4), "triton"),
                (QWEN3_30B_A3B, (1, 8, 1), "reference"),
            )
        ),
    ],
)
def test_more_memory_and_less_context_are_never_slower(model, mesh, attention, some):
    table = costs(model, mesh, attention, some)
    assert np.isfinite(table[-1]).all()
    assert table[0, 0] > table[-1, 0], "memory makes a difference"
    assert (table[:-1] >= table[1:]).all(), "more memory"
    assert (table[:, :-1] <= table[:, 1:]).all(), "less context"


def test_a_little_cache_is_given_away_for_computing_less_twice():
    server = sizes(mesh=(8, 1, 1), decode_rows=128, kernels=Kernels(rows="triton"))
    plan, longer = (best_plan(changed(server, max_context=each), gib(73)) for each in (8192, 65536))
    assert plan is not None
    assert longer is not None
    assert plan.levels[0] != "full"
    assert plan.cache > 0.8 * 128 * 2048 * plan.sizes.page / 16, "nearly 128 sequences of usual length"
    assert cost_of_token(plan) < cost_of_token(longer)


def test_recomputing_makes_a_plan_slower_by_what_it_computes():
    costs = [cost_of_token(make_plan(sizes(remat=level, decode_rows=8), gib(200))) for level in LEVELS]
    assert costs == sorted(costs)
    assert len(set(costs)) == len(costs)


def test_with_little_memory_more_is_computed_twice():
    plan = make_plan(sizes(max_context=2048), gib(36))
    assert plan.levels == ("full",)
    assert plan.train_tokens < 8192


def test_with_little_memory_fewer_rows_are_decoded_at_once():
    """The logits of all rows are held at once."""
    server = sizes(decode_rows=8192)
    assert make_plan(server, gib(200)).decode_rows == 8192
    assert make_plan(server, gib(40)).decode_rows < 8192


def test_long_rows_are_computed_twice_where_short_ones_need_not():
    plan = make_plan(sizes(max_context=40960), gib(130))
    levels = [
        LEVELS.index(plan.level(max(1, plan.train_tokens // length), length)) for length in (2048, 65536)
    ]
    assert levels[0] < levels[1]
    for shape in plan.sizes.shapes(plan.train_tokens):
        assert plan.steps.train(plan.level(*shape), shape) <= plan.room


@pytest.mark.parametrize("kind", [MODEL, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 4), (2, 2, 2)])
def test_a_tiny_model_fits_on_any_mesh(kind, mesh):
    plan = make_plan(sizes(kind, mesh, max_context=512, max_rank=8), gib(2))
    assert plan.cache_tokens >= 512


def test_a_cache_is_as_large_as_was_asked_for_or_refused():
    plan = make_plan(sizes(kv_cache_tokens=20_000), gib(120))
    assert plan.cache_tokens == 20_000
    assert plan.room > make_plan(sizes(), gib(120)).room, "what the cache leaves is for the steps"
    with pytest.raises(StartError, match=r"a cache of 9000000 tokens.*--kv-cache-tokens 0"):
        make_plan(sizes(kv_cache_tokens=9_000_000), gib(120))


def test_micro_batches_are_as_large_as_was_asked_for_or_refused():
    assert make_plan(sizes(train_tokens=1000), gib(120)).train_tokens == 1000
    with pytest.raises(StartError, match=r"steps of 900000 tokens.*--train-tokens 0"):
        make_plan(sizes(train_tokens=900_000), gib(120))


def test_blocks_on_cpus_are_small_and_all_that_training_needs_memory_for():
    server = sizes(max_context=512)
    large, small = (make_plan(server, replace(gib(120), platform=each)) for each in ("tpu", "cpu"))
    assert (large.train_tokens, report(large).block_tokens) == (8192, (256, 2048, 8192))
    assert (small.train_tokens, report(small).block_tokens) == (4096, (256,))
    assert max(shape.tokens for shape in small.train_shapes) == 512  # the longest row
    needs = [
        max(size for step, (_, size) in plan.worst().items() if step.startswith("train"))
        for plan in (small, large)
    ]
    assert needs[0] < needs[1] / 4


def test_on_gpus_many_devices_of_tp_take_larger_micro_batches():
    """Otherwise starting operations takes longer than the arithmetic."""
    tokens = {
        (tp, platform): make_plan(sizes(mesh=(1, 1, tp)), replace(gib(70), platform=platform)).train_tokens
        for tp, platform in ((1, "gpu"), (4, "gpu"), (8, "gpu"), (8, "tpu"))
    }
    assert tokens == {(1, "gpu"): 8192, (4, "gpu"): 8192, (8, "gpu"): 16384, (8, "tpu"): 8192}


def test_blocks_are_no_larger_than_the_micro_batches_that_were_asked_for():
    for platform, tokens, wanted in (("cpu", 64, (64,)), ("tpu", 256, (256,)), ("tpu", 500, (256, 500))):
        server = sizes(max_context=64, train_tokens=tokens)
        assert report(make_plan(server, replace(gib(120), platform=platform))).block_tokens == wanted


def test_a_level_is_what_was_asked_for():
    plan = make_plan(sizes(remat="full"), gib(250))
    assert {plan.level(*shape) for shape in plan.sizes.shapes(8192)} == {"full"}


def test_base_weights_are_split_over_fsdp_when_they_do_not_fit_otherwise():
    four = sizes(mesh=(4, 1, 1))
    assert not make_plan(four, gib(79)).splits_base
    split = make_plan(four, gib(28))
    assert split.splits_base
    assert split.base < make_plan(four, gib(79)).base / 3
    with pytest.raises(StartError, match="--shard-base-weights auto"):
        make_plan(changed(four, shard_base_weights="no"), gib(28))


REMEDIES = re.compile(r"--([a-z-]+) (\w+)")
FIELDS = {
    "max-context-length": "max_context",
    "max-lora-adapters": "adapter_slots",
    "max-lora-rank": "max_rank",
}


def remedies(server: Sizes, memory: UsableMemory) -> dict[str, str]:
    with pytest.raises(StartError) as refused:
        make_plan(server, memory)
    return dict(REMEDIES.findall(str(refused.value)))


def test_every_remedy_of_a_refusal_helps():
    server = sizes(adapter_slots=64)
    memory = gib(least_memory(server) - 1)
    told = remedies(server, memory)
    assert {"max-lora-adapters", "max-lora-rank", "tensor-parallel-size"} <= set(told)
    for option in FIELDS.keys() & told.keys():
        assert best_plan(changed(server, **{FIELDS[option]: int(told[option])}), memory) is not None
    tp = int(told["tensor-parallel-size"])
    assert best_plan(replace(server, mesh=abstract_mesh(1, 1, tp)), memory) is not None


@pytest.mark.parametrize(("may_be_fewer", "slots"), [(False, None), (True, 16)])
def test_there_are_fewer_training_slots_by_themselves_where_nobody_asked_for_more(may_be_fewer, slots):
    server = sizes(adapter_slots=64, may_have_fewer_slots=may_be_fewer)
    memory = gib(least_memory(server) - 1)
    if slots is None:
        with pytest.raises(StartError, match="64 training slots of rank"):
            make_plan(server, memory)
    else:
        plan = make_plan(server, memory)
        assert plan.sizes.setup.adapter_slots == report(plan).adapter_slots == slots
        assert best_plan(changed(server, adapter_slots=2 * slots), memory) is None
        assert plan == make_plan(plan.sizes, memory), "what is compiled aside has the same plan"


def test_a_model_that_does_not_fit_is_refused_with_the_fewest_training_slots():
    with pytest.raises(StartError, match="for 1 training slot of rank"):
        make_plan(sizes(adapter_slots=8, may_have_fewer_slots=True), gib(12))


def test_a_context_that_is_too_long_is_refused_with_one_that_fits():
    server = sizes(max_context=40960)
    memory = gib(least_memory(server) - 1)
    told = int(remedies(server, memory)["max-context-length"])
    assert told == 20480
    assert best_plan(changed(server, max_context=told), memory) is not None


def test_a_model_that_is_much_too_large_needs_more_devices():
    told = remedies(sizes(), gib(12))
    assert set(told) == {"tensor-parallel-size"}
    with pytest.raises(StartError, match=r"a device has 12.0 GiB.* 15.3 GiB for base weights"):
        make_plan(sizes(), gib(12))


def test_a_cache_in_host_memory_has_a_limit_and_looks_at_what_is_free():
    most = replace(gib(120), most_cache_tokens=32768)
    assert make_plan(sizes(), most).cache_tokens == 32768
    little = replace(most, most_resident=make_plan(sizes(), most).base)
    plan = make_plan(sizes(), little)
    assert plan.pages - 1 == plan.sizes.least_pages, "one sequence must be able to end"


def test_what_training_should_keep_is_bounded_where_keeping_is_slow():
    free, bounded = (make_plan(sizes(), replace(gib(500), most_saved=most)) for most in (None, GIB))
    assert free.level(4, 2048) == LEVELS[0]
    assert bounded.level(4, 2048) != LEVELS[0]


def test_a_little_more_free_memory_gives_the_same_pages_so_that_programs_are_found_again():
    most = gib(120)
    base = make_plan(sizes(), most).base

    def pages(free):
        return make_plan(sizes(), replace(most, most_resident=base + free)).pages

    assert pages(20 * GIB) == pages(20 * GIB + GIB // 64)
    assert pages(20 * GIB) < pages(30 * GIB)


def test_many_adapters_fit_where_layers_gather_theirs_one_after_the_other():
    h100 = gib(0.92 * 0.96 * 79.1)
    assert best_plan(sizes(mesh=(8, 1, 1), adapter_slots=64, bank_slots=66), h100) is not None


GPT_OSS = {  # gpt-oss-20b
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}


def gpt_oss(**option) -> Sizes:
    model = replace(declare(encoded_models.MODELS["mxfp4"] | GPT_OSS), **option)
    return sizes(model, adapter_slots=1, bank_slots=2, max_rank=16)


def test_without_training_its_memory_is_for_the_cache():
    h100, with_kernels = replace(gib(0.92 * 0.96 * 79.1), platform="gpu"), Kernels("gpu", rows="triton")
    both = sizes(max_context=40960, decode_rows=128, kernels=with_kernels)
    assert report(make_plan(both, h100)).cache_tokens == 127_584
    sampling = changed(both, role="sample", adapter_slots=0)
    plan = report(make_plan(sampling, h100))
    assert plan.cache_tokens == 352_000
    assert (plan.train_tokens, plan.block_tokens, plan.adapter_bytes, plan.remat) == (0, (), 0, {})
    assert {step.partition(" ")[0] for step in plan.step_needs} == {"prefill", "continued", "decode"}
    assert not [what for what, _ in choices(plan) if "training" in what]
    assert not [what for what, *_ in rows(plan) if "training" in what]


def test_all_weights_that_are_only_sampled_take_no_room_for_training():
    whole = sizes(full_copies=4, bank_slots=1, adapter_slots=1, max_rank=1)
    sampling = changed(whole, role="sample", adapter_slots=0)
    plan = report(make_plan(sampling, gib(75)))
    assert (plan.adapter_bytes, plan.base_bytes) == (0, 4 * sizes().whole_base)
    assert best_plan(whole, gib(75)) is None


def test_what_does_not_fit_even_without_training_names_no_option_of_training():
    with pytest.raises(StartError) as refused:
        make_plan(sizes(role="sample", adapter_slots=0), gib(16))
    assert "Each of these alone would make it fit: " in str(refused.value)
    assert not any(word in str(refused.value) for word in ("training", "--max-lora-adapters", "--train"))


@pytest.mark.parametrize("platform, model, tokens", [("gpu", QWEN3_8B, 325), ("cpu", QWEN3_8B, 2.2)])
def test_a_plan_says_how_many_tokens_are_computed_while_the_weights_are_read(platform, model, tokens):
    plan = best_plan(sizes(model), UsableMemory(70 * GIB, platform))
    assert plan is not None
    assert report(plan).ridge_tokens == pytest.approx(tokens, rel=0.02)


def test_steps_that_read_a_part_of_a_prompt_have_room_for_it():
    on_gpu = sizes(MIXTURE, kernels=Kernels(platform="gpu"))
    plan = best_plan(on_gpu, UsableMemory(70 * GIB, "gpu"))
    assert plan is not None
    assert plan.steps.decode(64, 8192, on_gpu.chunk_part) > plan.steps.decode(64, 8192)
    assert on_gpu.chunk_part == 256
    assert changed(on_gpu, batch_invariant=True).chunk_part == sizes(MIXTURE).chunk_part == 0


def test_packed_experts_are_proposed_where_they_make_it_fit():
    assert next(_remedies(gpt_oss(), partial(best_plan, memory=gib(40)))) == "--expert-weights packed"
    packed = report(make_plan(gpt_oss(packs_experts=True), gib(40)))
    assert packed.base_bytes < 0.35 * gpt_oss().whole_base
    experts = 24 * 32 * 3 * 2880 * 2880
    assert gpt_oss().whole_base - packed.base_bytes == experts * (2 - (4 + 8 / 32) / 8)


def test_a_tpu_has_room_for_a_layer_that_is_decoded():
    planned = [
        best_plan(gpt_oss(packs_experts=True), replace(gib(60), platform=platform))
        for platform in ("gpu", "tpu")
    ]
    on_gpu, on_tpu = (each.steps.decode(32, 8192) for each in planned if each is not None)
    assert on_tpu - on_gpu == 32 * 3 * 2880 * 2880 * 2


def test_a_base_in_fewer_bits_is_proposed_where_it_makes_it_fit():
    server = sizes(max_context=2048, adapter_slots=1, bank_slots=2, max_rank=16)
    packed = replace(QWEN3_8B, base_encoding=BASE_DTYPES["int8"])
    smaller = replace(server, model=packed)
    maps = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    assert server.whole_base - smaller.whole_base == maps * (2 - (8 + 16 / 32) / 8)
    memory = gib(least_memory(server) - 1)
    assert best_plan(server, memory) is None
    assert "--base-dtype int8" in list(_remedies(server, partial(best_plan, memory=memory)))
    assert not any(
        each.startswith("--base") for each in _remedies(smaller, partial(best_plan, memory=gib(1)))
    )
