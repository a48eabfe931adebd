import pytest

from spmd_tx.coordinator.sampling.shapes import SamplingShapes
from spmd_tx.coordinator.scheduler.warm_up_menu import program_menu
from spmd_tx.coordinator.training.attention_cost import AttentionCost
from spmd_tx.coordinator.training.packing import TrainingShapes

BANK_SLOTS = 10


def menu_of(context, shards=1, on_cpu=False, batch_invariant=False):
    sampling = SamplingShapes(
        shards, context, page_size=16, decode_rows=128, on_cpu=on_cpu, batch_invariant=batch_invariant
    )
    tokens, blocks = (4096, (256,)) if on_cpu else (8192, (256, 8192))
    return program_menu(
        TrainingShapes(shards, tokens, blocks, context, AttentionCost(5e-4)), sampling, BANK_SLOTS
    )


@pytest.mark.parametrize("context, most", [(512, 16), (4096, 22), (32768, 28)])
def test_training_on_cpus_has_one_program_per_step_and_row_length(context, most):
    menu = menu_of(context, on_cpu=True)
    assert len([shape for shape in menu if shape.step in ("forward", "forward_backward")]) == most


@pytest.mark.parametrize("context, most", [(512, 112), (2048, 142), (32768, 202)])
@pytest.mark.parametrize("shards", [1, 8])
def test_the_menu_is_bounded_and_has_no_program_twice(context, most, shards):
    menu = menu_of(context, shards)
    assert len(set(menu)) == len(menu) <= most


@pytest.mark.parametrize("context, ridge, counts", [(4096, 300.0, 3), (1024, 300.0, 0), (4096, 10.0, 0)])
def test_decodes_of_most_rows_that_read_chunks_are_at_the_end_of_the_menu(context, ridge, counts):
    sampling = SamplingShapes(2, context, page_size=16, decode_rows=128, ridge=ridge)
    menu = program_menu(None, sampling, BANK_SLOTS)
    beside = [shape for shape in menu if shape.chunk]
    assert len(beside) == counts
    assert {(shape.rows, shape.chunk) for shape in beside} <= {(256, 1024)}
    assert not any(shape.chunk for shape in menu[: len(menu) // 2])


@pytest.mark.parametrize("on_cpu", [False, True])
def test_few_rows_speculate_where_the_model_makes_drafts(on_cpu):
    how = {"page_size": 16, "decode_rows": 128, "on_cpu": on_cpu, "speculates": True}
    of_texts, of_model = (SamplingShapes(2, 4096, **how, draft_cost=cost) for cost in (0.0, 0.02))
    assert not any(shape.speculative for shape in program_menu(None, of_texts, BANK_SLOTS))
    menu = program_menu(None, of_model, BANK_SLOTS)
    assert len(set(menu)) == len(menu)
    assert {shape.rows for shape in menu if shape.speculative} == {4, 8, 16, 32}
    first = next(shape for shape in menu if shape.step == "decode")
    assert (first.rows, first.speculative) == (2, False)


@pytest.mark.parametrize("context", [4096, 131072])
@pytest.mark.parametrize("shards", [1, 8])
def test_on_cpus_sampling_needs_few_programs_whatever_the_context(context, shards):
    menu = menu_of(context, shards, on_cpu=True)
    assert len(set(menu)) == len(menu)
    assert len([shape for shape in menu if shape.step in ("prefill", "decode")]) <= 24


@pytest.mark.parametrize("context, most", [(4096, 62), (32768, 62), (131072, 66)])
def test_on_cpus_the_whole_menu_is_short(context, most):
    assert len(menu_of(context, on_cpu=True)) <= most


@pytest.mark.parametrize("on_cpu", [False, True])
def test_one_batch_invariant_program_reads_all_prompts_and_one_draws_all_tokens(on_cpu):
    menu = menu_of(32768, on_cpu=on_cpu, batch_invariant=True)
    prefill, decode = (shape for shape in menu[:5] if shape.step in ("prefill", "decode"))
    assert prefill.logprobs
    assert prefill.row_length == (64 if on_cpu else 256)
    assert decode.rows == (16 if on_cpu else 128)
    assert not [shape for shape in menu[5:] if shape.step in ("prefill", "decode")]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_first_answer_and_a_first_step_need_the_beginning_of_the_menu_only(on_cpu):
    beginning = {shape.step for shape in menu_of(32768, on_cpu=on_cpu)[:15]}
    assert beginning == {"create_adapter", "save_sampler", "optim_step"} | {
        *("forward_backward", "forward", "prefill", "decode")
    }


@pytest.mark.parametrize("on_cpu", [False, True])
def test_where_nothing_is_trained_only_programs_of_sampling_are_compiled(on_cpu):
    sampling = SamplingShapes(1, 4096, page_size=16, decode_rows=128, on_cpu=on_cpu)
    menu = program_menu(None, sampling, BANK_SLOTS)
    assert {shape.step for shape in menu} == {"prefill", "decode", "load_sampler", "page_out", "page_in"}
    assert len(set(menu)) == len(menu)
    both = [shape for shape in menu_of(4096, on_cpu=on_cpu) if shape.step in ("prefill", "decode")]
    assert [shape for shape in menu if shape.step in ("prefill", "decode")] == both
    assert "load_sampler" in [shape.step for shape in menu[:4]]
