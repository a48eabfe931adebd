from spmd_tx.coordinator.sampling.speculation.guess import UNPROVED, Record
from spmd_tx.coordinator.sampling.speculation.texts import SessionTexts


def test_a_decode_counts_by_how_many_drafts_it_tried():
    few, many = Record(), Record()
    for record in (few, many):
        record.note(right=20, wrong=0)
    few.note(right=0, wrong=1)
    many.note(right=0, wrong=16)
    assert many.acceptance < 0.4 < 0.8 < few.acceptance
    many.note(right=48, wrong=0)
    assert many.acceptance > 0.8


def test_the_first_drafts_count_most():
    new, old = Record(), Record()
    old.note(right=0, wrong=20)
    for record in (new, old):
        assert record.acceptance <= UNPROVED
        record.note(right=4, wrong=0)
    assert new.acceptance > 0.6 > 0.4 > old.acceptance


def test_the_next_prompt_of_a_session_begins_with_what_came_of_others():
    texts = SessionTexts()
    first = Record(texts.of("one", [1, 2, 3]).record)
    first.note(right=16, wrong=0)
    of_next = Record(texts.of("one", [4, 5, 6]).record)
    assert of_next.acceptance == first.acceptance > 0.8
    of_next.note(right=0, wrong=1)
    assert of_next.acceptance > 0.7  # much was seen before
    assert Record(texts.of("two", [1, 2, 3]).record).acceptance == UNPROVED
