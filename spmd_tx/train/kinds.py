"""Chooses the kind of training by what the rows are."""

from collections.abc import Sequence
from typing import Any

from spmd_tx.errors import StartError
from spmd_tx.train.folder import RunFolder
from spmd_tx.train.loop import Kind
from spmd_tx.train.preference import AnswerPair, Preferences
from spmd_tx.train.rendering import LearnedTokens, Renderer
from spmd_tx.train.rows import DataRow, PreferenceRow
from spmd_tx.train.supervised import Supervised


def of_rows(
    trainer: Any,
    renderer: Renderer,
    folder: RunFolder,
    rows: tuple[Sequence[DataRow], Sequence[DataRow]],
    options: tuple[int, int, float],
) -> Kind:
    """Return what learns from rows, and is evaluated on others. ``options`` are batch size, seed and beta."""
    trained, held_out = rows
    preferences = [isinstance(row, PreferenceRow) for row in (*trained, *held_out)]
    if all(preferences):
        return Preferences(trainer, _pairs(renderer, trained), _pairs(renderer, held_out), folder, options)
    if any(preferences):
        raise StartError("--eval has other rows than the data: preferences, or none, in both")
    sequences = _sequences(renderer, trained)
    if not sequences:
        raise StartError("no token of the data is learned; are the prompts longer than --max-length?")
    return Supervised(trainer, sequences, _sequences(renderer, held_out), *options[:2])


def _sequences(renderer: Renderer, rows: Sequence[DataRow]) -> list[LearnedTokens]:
    return [each for row in rows for each in renderer.sequences(row)]


def _pairs(renderer: Renderer, rows: Sequence[DataRow]) -> list[AnswerPair]:
    found = [renderer.pair(row) for row in rows if isinstance(row, PreferenceRow)]
    return [pair for pair in found if all(answer.count for answer in pair)]
