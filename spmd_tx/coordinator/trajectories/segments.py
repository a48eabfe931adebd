"""Makes sequences to train on from the turns of a trajectory: one for each run of turns that go on.

Within a segment every prompt begins with all tokens before it, so one forward pass scores all of its turns.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from spmd_tx.coordinator.conversation.messages import MessageImage
from spmd_tx.coordinator.conversation.turn_tree import BranchCause
from spmd_tx.coordinator.storage.tables import TrajectoryRow, TurnRow
from spmd_tx.coordinator.text.continuation import path_tokens
from spmd_tx.coordinator.text.model_text import ModelText
from spmd_tx.coordinator.trajectories.trees import TurnOfRow, read_rows
from spmd_tx.coordinator.wire.trajectories import Leaves, Segment, SegmentImage, SegmentSpan, SegmentTurn


def segments(
    trajectory: TrajectoryRow, rows: Sequence[TurnRow], texts: Mapping[str, ModelText], leaves: Leaves
) -> list[Segment]:
    """Return the segments of a trajectory, the oldest leaf's first. Blocks. Raises DamagedBody.

    A turn trains in one of them only.
    """
    turns = read_rows(rows, texts)
    by_id = {each.turn.id: each for each in turns}
    trained, made = set[str](), list[Segment]()
    for leaf in _leaves(turns, leaves):
        known = list[MessageImage]()  # of the turns before a run
        for run in _runs(leaf, by_id):
            if any(each.turn.id not in trained for each in run):
                made.append(_segment(trajectory, run, trained, known))
            known += [image for each in run for image in each.images]
            trained |= {each.turn.id for each in run}
    return made


def _leaves(turns: Sequence[TurnOfRow], which: Leaves) -> list[TurnOfRow]:
    parents = {each.turn.parent.id for each in turns if each.turn.parent is not None}
    found = [each for each in turns if each.turn.id not in parents]
    if which == "last":
        return found[-1:]
    return found if which == "all" else [each for each in found if not _is_superseded(each, turns)]


def _is_superseded(leaf: TurnOfRow, turns: Sequence[TurnOfRow]) -> bool:
    """Say whether a later request went on from the same turn, or asked the same again."""
    return any(
        each.row.number > leaf.row.number
        and each.turn.parent is leaf.turn.parent
        and (leaf.turn.parent is not None or each.prompt.last_key == leaf.prompt.last_key)
        for each in turns
    )


def _runs(leaf: TurnOfRow, by_id: dict[str, TurnOfRow]) -> list[list[TurnOfRow]]:
    """Return the path to a leaf in runs: one begins where a prompt leaves out a token of the turn before."""
    path = [by_id[turn.id] for turn in leaf.turn.path()]
    runs = list[list[TurnOfRow]]()
    for each in reversed(path):
        if not runs or each.turn.dropped:
            runs.append([])
        runs[-1].append(each)
    return runs


def _segment(
    trajectory: TrajectoryRow, run: Sequence[TurnOfRow], trained: set[str], known: Sequence[MessageImage]
) -> Segment:
    """``known`` are the images of the turns before, which the first prompt of a run has again."""
    first = run[0]
    tokens, mask, logprobs = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    forced = list[np.ndarray]()
    spans, entries, length = list[SegmentSpan](), list[SegmentTurn](), 0
    images = list[SegmentImage]()
    for each in run:
        turn, row = each.turn, each.row
        whole = each is first and turn.parent is not None
        prompt = (
            np.asarray(path_tokens(turn), np.int32)[: -len(turn.sampled) or None] if whole else turn.prompt
        )
        trains = turn.id not in trained
        start = 0 if each is first else row.reused
        images += _placed([*(known if whole else ()), *each.images], prompt, each.pad, length)
        tokens += [prompt, turn.sampled]
        mask += [np.zeros(len(prompt), bool), ~each.forced & trains]
        forced += [np.zeros(len(prompt), bool), each.forced]
        logprobs += [np.zeros(len(prompt), np.float32), each.logprobs]
        spans += [
            SegmentSpan(turn.id, "prompt", start, len(prompt)),
            SegmentSpan(turn.id, "sampled", 0, len(turn.sampled)),
        ]
        length += len(prompt)
        reward = (row.rewards or {}).get(turn.id.rpartition(":")[2], {}).get("reward")
        entries.append(
            SegmentTurn(turn.id, row.model, row.weights, length, len(turn.sampled), row.state, reward, trains)
        )
        length += len(turn.sampled)
    return Segment(
        trajectory_id=trajectory.id,
        name=trajectory.name,
        reward=trajectory.reward,
        cause=BranchCause.STOP_DIFFERS if first.turn.dropped else first.row.cause,
        tokens=np.concatenate(tokens).tolist(),
        sampled=np.concatenate(mask).tolist(),
        forced=np.concatenate(forced).tolist(),
        logprobs=np.concatenate(logprobs).tolist(),
        spans=[span for span in spans if span.length],
        turns=entries,
        images=images,
    )


def _placed(
    images: Sequence[MessageImage], prompt: np.ndarray, pad: int | None, before: int
) -> list[SegmentImage]:
    """Return images with their places, behind ``before`` tokens: each begins at the next pad."""
    pads, at, found = np.flatnonzero(prompt == pad), 0, list[SegmentImage]()
    for image in images:
        at = int(pads[np.searchsorted(pads, at)])
        found.append(SegmentImage(start=before + at, length=image.tokens, data=image.data))
        at += image.tokens
    return found
