import pytest

from spmd_tx.coordinator.packing import Grid
from spmd_tx.coordinator.program_menu import SamplingSizes, program_menu


def sizes(context, shards=1, rows=64, tokens=8192):
    return Grid(shards, tokens, context), SamplingSizes(
        shards=shards, rows=rows, page_size=16, prefill_tokens=tokens, max_context=context, bank_slots=10
    )


@pytest.mark.parametrize("context, most", [(512, 170), (2048, 190), (32768, 280)])
def test_the_menu_is_bounded_and_has_no_program_twice(context, most):
    menu = program_menu(*sizes(context))
    assert len(set(menu)) == len(menu) <= most


def test_a_first_answer_and_a_first_step_need_the_beginning_of_the_menu_only():
    beginning = {shape.step for shape in program_menu(*sizes(32768))[:8]}
    assert beginning == {"create_adapter", "save_sampler", "optim_step"} | {
        *("forward_backward", "forward", "prefill", "decode")
    }
