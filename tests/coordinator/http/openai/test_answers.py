"""An answer says the same in how many pieces it is ever written."""

import json

import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from spmd_tx.coordinator.http.openai import answers, schemas
from spmd_tx.coordinator.http.openai.answers import (
    Answering,
    ChatFormat,
    CompletionFormat,
    WholeAnswer,
    token_texts,
)
from spmd_tx.coordinator.http.openai.completion_events import CompletionEvents
from spmd_tx.coordinator.http.text_generation import choices
from spmd_tx.coordinator.http.text_generation.choices import ChoiceProgress
from spmd_tx.coordinator.http.text_generation.detokenize import SampleText
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence, TopLogprobs

USAGE = schemas.CompletionUsage(3, 14, 17)
SEQUENCES = 2


@pytest.fixture
def sequences(tokenizer):
    rng = np.random.default_rng(0)
    found = []
    for number in range(SEQUENCES):
        tokens = [*tokenizer.encode("añ😀z and more").ids, 0]
        top = TopLogprobs(
            rng.integers(0, 400, (len(tokens), 5)).astype(np.int32),
            -rng.random((len(tokens), 5)).astype(np.float32),
        )
        logprobs = [-float(place) / 8 for place in range(len(tokens))]
        found.append(SampledSequence(tokens, logprobs, "stop" if number else "length", top))
    return found


def parts_of(sequences, tokenizer, most, has_top, has_offsets):
    """Take each sample in parts of so many tokens, as a thread would get them."""
    for index, sequence in enumerate(sequences):
        choice = ChoiceProgress(index, SampleText(tokenizer, ["more"]), has_offsets)
        sample = (
            sequence if has_top else SampledSequence(sequence.tokens, sequence.logprobs, sequence.stop_reason)
        )
        while part := choice.take(sample, most):
            yield part
        assert choice.is_over
        assert choice.take(sample, most) is None


def form_of(kind, tokenizer, has_logprobs, has_token_ids, width):
    answering = Answering(
        "id", 5, '"choices":[]}', token_texts(tokenizer), has_logprobs, has_token_ids, width
    )
    return kind(answering)


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
@pytest.mark.parametrize("has_logprobs, width", [(False, 0), (True, 0), (True, 5)])
@pytest.mark.parametrize("has_token_ids", [False, True])
def test_a_whole_answer_is_the_same_in_any_pieces(
    tokenizer, sequences, kind, has_logprobs, width, has_token_ids
):
    def written(most):
        form = form_of(kind, tokenizer, has_logprobs, has_token_ids, width)
        answer = WholeAnswer(form)
        parts = parts_of(sequences, tokenizer, most, width > 0, kind is CompletionFormat)
        pieces = [answer.piece([part]) for part in parts]
        return json.loads(answer.begin() + b"".join(pieces) + answer.end(USAGE))

    whole = written(1000)
    (Completion if kind is CompletionFormat else ChatCompletion).model_validate(whole, strict=True)
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 14, "total_tokens": 17}
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    for choice, sequence in zip(whole["choices"], sequences, strict=True):
        text = choice["text"] if kind is CompletionFormat else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == ("añ😀z and ", sequence.stop_reason)
        assert choice.get("token_ids") == (sequence.tokens if has_token_ids else None)
        assert (choice["logprobs"] is not None) == has_logprobs
        assert logprobs_of(choice) == (sequence.logprobs if has_logprobs else None)
    for most in (1, 2, 3):
        assert written(most) == whole


def logprobs_of(choice):
    logprobs = choice["logprobs"]
    if logprobs is None:
        return None
    return logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs["content"]]


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
def test_the_events_of_a_stream_add_up_to_the_whole_answer(tokenizer, sequences, kind):
    form = form_of(kind, tokenizer, True, True, 5)
    parts = list(parts_of(sequences, tokenizer, 2, True, kind is CompletionFormat))
    text = CompletionEvents(form, [0, 1], wants_usage=False).piece(parts).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    answer = WholeAnswer(form_of(kind, tokenizer, True, True, 5))
    again = list(parts_of(sequences, tokenizer, 1000, True, kind is CompletionFormat))
    whole = json.loads(answer.begin() + answer.piece(again) + answer.end(USAGE))
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        for name in choice["logprobs"]:
            assert [each for event in mine for each in event["logprobs"][name]] == choice["logprobs"][name]
        assert [each for event in mine for each in event["token_ids"]] == choice["token_ids"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_texts_of_tokens_are_remembered_up_to_a_number(monkeypatch):
    class Counting:
        calls = 0

        def decode(self, ids, skip_special_tokens=True):
            self.calls += 1
            return f"{ids[0]}"

    monkeypatch.setattr(answers, "MOST_TEXTS", 2)
    decoder = Counting()
    texts = token_texts(decoder)
    assert [texts(token)[0] for token in (1, 1, 2, 1)] == ["1", "1", "2", "1"]
    assert decoder.calls == 2
    assert texts(3) == ("3", [51])
    assert texts(2) == ("2", [50])
    assert decoder.calls == 4


def test_a_part_costs_what_is_written_of_it(tokenizer, sequences):
    (part, *_) = parts_of(sequences, tokenizer, 4, True, False)
    assert part.cost == 5 * (choices.TOKEN_COST + 5)
