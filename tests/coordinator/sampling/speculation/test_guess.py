from spmd_tx.coordinator.sampling.speculation.guess import LIKELY, Record
from spmd_tx.coordinator.sampling.speculation.texts import SessionTexts


def test_a_decode_counts_by_how_many_drafts_it_tried():
    few, many = Record(), Record()
    few.note(right=0, wrong=1)
    many.note(right=0, wrong=16)
    assert many.acceptance < 0.3 < few.acceptance < LIKELY
    many.note(right=48, wrong=0)
    assert many.acceptance > 0.8


def test_the_next_prompt_of_a_session_begins_with_what_came_of_others():
    texts = SessionTexts()
    first = Record(texts.of("one", [1, 2, 3]).record)
    assert first.is_untried
    first.note(right=0, wrong=16)
    of_next = Record(texts.of("one", [4, 5, 6]).record)
    assert of_next.acceptance == first.acceptance
    assert not of_next.is_untried
    elsewhere = Record(texts.of("two", [1, 2, 3]).record)
    assert (elsewhere.acceptance, elsewhere.is_untried) == (LIKELY, True)


def test_what_is_not_tried_is_tried_again_some_day():
    record = Record()
    record.note(right=0, wrong=16)
    before = record.acceptance
    for _ in range(1000):
        record.pass_by()
    assert before < record.acceptance <= LIKELY
