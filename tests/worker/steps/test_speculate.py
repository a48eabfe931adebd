"""What counts of the tokens that followers draw: those behind right drafts, up to the end of a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.protocol.commands import REJECTED
from spmd_tx.worker.steps.decode_rows import RowState
from spmd_tx.worker.steps.speculate import Speculation

DRAFTS = [50, 51, 52, 53, 54, 55, 56, 57]
DEPTHS = [0, 1, 2, 3, 0, 0, 1]  # a row with three followers, one with none, and one with one
LEADERS = 0, 4, 5


def begin(remaining=9, drafts=DRAFTS):
    """Each row has drawn token 40 at position 7."""
    rows, depths = len(DEPTHS), np.array(DEPTHS, np.int32)
    drafts = [*drafts, *[-1] * (len(DRAFTS) - len(drafts))]
    guess = begun(np.tile(np.array(drafts, np.int32), (rows, 1)), depths)
    left = np.where(depths == 0, remaining, 0).astype(np.int32)
    return guess, RowState(np.full(rows, 40, np.int32), np.full(rows, 7, np.int32), left)


begun, spread = jax.jit(Speculation.begin), jax.jit(Speculation.spread)


def step(guess, state, drawn, stop=-1):
    guess, state, tokens = settled(guess, state, np.array(drawn, np.int32), np.int32(stop))
    return guess, state, np.asarray(tokens).tolist()


@jax.jit
def settled(guess, state, drawn, stop):
    read = guess.spread(state)
    is_alive = read.remaining > 0
    after = RowState(
        tokens=jnp.where(is_alive, drawn, read.tokens),
        positions=read.positions + is_alive.astype(jnp.int32),
        remaining=jnp.where(is_alive & (drawn != stop), read.remaining - 1, 0),
    )
    return guess.settle(read, after, jnp.where(is_alive, drawn, -1))


def of_leaders(state):
    return [np.asarray(each)[list(LEADERS)].tolist() for each in (state.tokens, state.positions)]


def test_followers_read_the_drafts_behind_their_leader():
    guess, state = begin()
    read = spread(guess, state)
    assert np.asarray(read.tokens).tolist() == [40, 50, 51, 52, 40, 40, 50]
    assert np.asarray(read.positions).tolist() == [7, 8, 9, 10, 7, 7, 8]
    assert np.asarray(read.remaining).tolist() == [9, 8, 7, 6, 9, 9, 8]


@pytest.mark.parametrize(
    ("drawn", "kept", "last", "positions"),
    [
        ([50, 51, 52, 53, 60, 50, 51], [50, 51, 52, 53, 60, 50, 51], [53, 60, 51], [11, 8, 9]),
        ([50, 51, 99, 53, 60, 61, 51], [50, 51, 99, REJECTED, 60, 61, REJECTED], [99, 60, 61], [10, 8, 8]),
        ([99, 51, 52, 53, 60, 50, 98], [99, *[REJECTED] * 3, 60, 50, 98], [99, 60, 98], [8, 8, 9]),
    ],
)
def test_a_wrong_draft_ends_what_counts(drawn, kept, last, positions):
    _, state, tokens = step(*begin(), drawn)
    assert tokens == kept
    assert of_leaders(state) == [last, positions]


def test_drafts_go_on_where_the_row_is():
    guess, state, _ = step(*begin(), [50, 51, 52, 53, 50, 99, 0])
    reads = np.asarray(spread(guess, state).tokens).tolist()
    assert reads[:4] == [53, 54, 55, 56]
    assert reads[6] == 51, "another token in place of the first draft: it may go on alike"


def test_a_row_finds_its_last_two_tokens_again():
    guess, state, _ = step(*begin(), [99, 0, 0, 0, 0, 0, 0])
    guess, state, _ = step(guess, state, [54, 0, 0, 0, 0, 0, 0])
    guess, state, _ = step(guess, state, [55, 0, 0, 0, 0, 0, 0])
    assert np.asarray(spread(guess, state).tokens).tolist()[:3] == [55, 56, 57]


def test_nothing_counts_behind_a_stop_token_or_beyond_what_remains():
    _, state, tokens = step(*begin(), [50, 51, 52, 53, 60, 50, 51], stop=51)
    assert tokens[:4] == [50, 51, REJECTED, REJECTED]
    assert np.asarray(state.remaining)[0] == 0
    _, state, tokens = step(*begin(remaining=2), [50, 51, 52, 53, 60, 50, 51])
    assert tokens == [50, 51, -1, -1, 60, 50, 51]
    assert np.asarray(state.remaining)[list(LEADERS)].tolist() == [0, 1, 0]


def test_a_leader_goes_on_from_the_state_of_its_last_row():
    guess, state = begin()
    guess = guess.replace(slots=np.array([3, 11, 12, 13, 5, 8, 4], np.int32))
    guess, state, _ = step(guess, state, [50, 51, 99, 53, 60, 50, 51])
    assert guess.slots.tolist() == [12, 11, 3, 13, 5, 4, 8]
    guess, _, _ = step(guess, state, [98, 0, 0, 0, 60, 50, 0])
    assert guess.slots.tolist() == [12, 11, 3, 13, 5, 4, 8]


def test_followers_without_drafts_are_dead():
    _, _, tokens = step(*begin(drafts=[50, -1, -1]), [50, 51, 52, 53, 60, 50, 51])
    assert tokens == [50, 51, -1, -1, 60, 50, 51]
