"""Reads from datums which advantage a client gave to which sample. Pure."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from spmd_tx.coordinator.requests.records import LearnedFacts
from spmd_tx.coordinator.requests.sample_notes import SEQUENCE_ID
from spmd_tx.coordinator.wire.training_protobuf import Datum


def advantages_of_samples(datums: Iterable[Datum]) -> LearnedFacts:
    """Return the mean advantage of each sample that spans of targets name, over its tokens that have one.

    A sample without any has 0. Spans that name no sample say nothing.
    """
    found = defaultdict[str, dict[int, float]](dict)
    for datum in datums:
        sums = defaultdict[str, list[np.ndarray]](list)
        advantages, start = datum.loss_inputs["advantages"].ravel(), 0
        for span in datum.target_spans:
            if span.is_sampled:
                sums[span.sequence_id].append(advantages[start : start + span.length])
            start += span.length
        for sequence, parts in sums.items():
            match = SEQUENCE_ID.fullmatch(sequence)
            if match is not None:
                values = np.concatenate(parts)
                counting = values[values != 0]
                mean = float(counting.mean(dtype=np.float64)) if len(counting) else 0.0
                found[match[1]][int(match[2])] = mean
    return LearnedFacts(found)
