import pytest

from spmd_tx.coordinator.pages import TRASH_PAGE, PagePool, pages_for


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


def test_pages_with_one_holder_are_counted():
    pool = PagePool(4)
    pages = pool.take(3)
    pool.hold(pages[:1])
    assert pool.held_once(pages) == 2


def test_taking_more_than_is_free_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError, match="4 pages wanted, 3 free"):
        PagePool(4).take(4)


@pytest.mark.parametrize("tokens, pages", [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_the_last_page_may_be_filled_in_part(tokens, pages):
    assert pages_for(tokens, page_size=16) == pages
