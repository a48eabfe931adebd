"""Predicts the speed of a server from its programs: training, sampling, an iteration of both.

An iteration of reinforcement learning samples answers to prompts, trains once on all of them, and updates
the adapter.
Programs follow each other without pauses; what the host does between them is not in it.
"""

import math
from collections.abc import Sequence

from spmd_tx.worker.aot.report import Prediction, ProgramReport

NEEDED = ("train", "prefill", "decode", "optim_step")  # kinds of programs
PROMPTS, ANSWERS = 64, 16  # of an iteration
PROMPT_TOKENS, ANSWER_TOKENS = 512, 1536  # so that a sequence has the usual length


def predict(programs: Sequence[ProgramReport]) -> Prediction | None:
    """Return the prediction; None where one of the programs that it needs is missing."""
    usual = {each.kind: each for each in programs if each.is_usual and each.has_figures}
    if not usual.keys() >= {*NEEDED}:
        return None
    train, prefill, decode = (usual[kind] for kind in ("train", "prefill", "decode"))
    sequences = PROMPTS * ANSWERS
    prefills = math.ceil(PROMPTS * PROMPT_TOKENS / prefill.tokens)
    rounds = math.ceil(sequences / decode.tokens)
    sampling = prefills * prefill.expected_seconds + rounds * ANSWER_TOKENS * decode.expected_seconds
    micro_batches = math.ceil(sequences * (PROMPT_TOKENS + ANSWER_TOKENS) / train.tokens)
    training = micro_batches * train.expected_seconds + usual["optim_step"].expected_seconds
    return Prediction(
        training_tokens=train.tokens_per_second,
        prefill_tokens=prefill.tokens_per_second,
        decode_tokens=decode.tokens_per_second,
        iteration_seconds=sampling + training,
        iteration_sampling_seconds=sampling,
        iteration_training_seconds=training,
    )
