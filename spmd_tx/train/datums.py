"""Makes the SDK's datums, and reads what comes back."""

from collections.abc import Sequence

import numpy as np
from tinker import types

from spmd_tx.train.rendering import LearnedTokens


def datum(learned: LearnedTokens, weight: float = 1.0) -> types.Datum:
    """Make a datum of ``cross_entropy``: position i predicts token i + 1, weighed where it is learned."""
    return _datum(learned.tokens, weights=weight * _learned(learned))


def policy_datum(prompt: Sequence[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """Make a datum of ``importance_sampling`` from an answer with its log-probabilities.

    Its spans tell the server which sample it is, so that the console shows the advantage beside it.
    """
    unlearned = np.zeros(len(prompt) - 1)
    inputs = {
        "logprobs": np.concatenate([unlearned, answer.logprobs or []]),
        "advantages": np.concatenate([unlearned, np.full(len(answer.tokens), advantage)]),
    }
    return _datum([*prompt, *answer.tokens], **inputs).with_provenance(
        model_input=_spans(answer.sequence_id, 0, len(prompt), len(answer.tokens) - 1),
        loss_fn_inputs=_spans(answer.sequence_id, 1, len(prompt) - 1, len(answer.tokens)),
    )


def _spans(sequence_id: str, offset: int, prompt: int, sampled: int) -> types.ProvenanceSpans:
    """Say that tokens of a prompt come first, those from ``offset`` on, and then sampled ones."""
    return [
        types.PromptProvenanceSpan(sequence_id=sequence_id, offset=offset, length=prompt),
        types.SampledProvenanceSpan(sequence_id=sequence_id, length=sampled),
    ]


def learned_logprobs(output: types.ForwardBackwardOutput, place: int, learned: LearnedTokens) -> np.ndarray:
    """Return the log-probabilities of a datum's learned tokens, float32 [count]."""
    return output.loss_fn_outputs[place]["logprobs"].to_numpy()[_learned(learned) > 0]


def _learned(learned: LearnedTokens) -> np.ndarray:
    return np.array(learned.is_learned[1:], np.float32)


def _datum(tokens: Sequence[int], **inputs: np.ndarray) -> types.Datum:
    tensors = {
        name: types.TensorData.from_numpy(values.astype(np.float32)) for name, values in inputs.items()
    }
    targets = types.TensorData.from_numpy(np.array(tokens[1:], np.int64))
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": targets, **tensors},
    )
