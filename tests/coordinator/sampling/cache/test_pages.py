import pytest

from spmd_tx.coordinator.sampling.cache.pages import TRASH_PAGE, PagePool, pages_for


def test_the_trash_page_is_never_given_out():
    pool = PagePool(8)
    assert TRASH_PAGE not in pool.take(pool.free)


def test_a_page_is_free_again_only_when_its_last_holder_lets_go():
    pool = PagePool(3)
    pages = pool.take(2)
    pool.hold(pages)
    pool.release(pages)
    assert pool.free == 0
    pool.release(pages)
    assert pool.free == 2


def test_holders_of_pages_are_counted():
    pool = PagePool(4)
    pages = pool.take(3)
    pool.hold(pages[:1])
    assert [pool.holders(page) for page in pages] == [2, 1, 1]


def test_taking_more_than_is_free_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError, match="4 pages wanted, 3 free"):
        PagePool(4).take(4)


@pytest.mark.parametrize("tokens, pages", [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_the_last_page_may_be_filled_in_part(tokens, pages):
    assert pages_for(tokens, page_size=16) == pages


def test_remembered_pages_are_free_but_reused_last_and_from_their_end():
    reused = []
    pool = PagePool(6, reused.append)
    pages = pool.take(3)
    for page in pages[:2]:
        pool.remember(page)
    pool.release(pages)
    assert pool.free == 5
    pool.take(3)
    assert reused == []
    pool.hold(pages[:1])
    assert pool.take(1) == reused == pages[1:2]
    assert pool.free == 0


def test_a_page_that_was_taken_since_cannot_be_recalled():
    pool = PagePool(3)
    first, second = pool.take(2)
    takes = [pool.takes(page) for page in (first, second)]
    pool.release([first, second])
    (taken,) = pool.take(1)
    pool.release([taken])
    other = second if taken == first else first
    assert not pool.recall(taken, takes[0])
    assert pool.recall(other, takes[1])
    assert pool.free == 2
