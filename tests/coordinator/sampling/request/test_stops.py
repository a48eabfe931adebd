import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spmd_tx.coordinator.http.text_generation.detokenize import Detokenizer
from spmd_tx.coordinator.sampling.request.stops import StopRule, StopWatch, stop_rule

END_OF_TEXT = (7, 9)

# Every byte is a token, and some words are as well; the ids of bytes follow the alphabet's order.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["Ġthe", "Ġend", "Ċ", "ĊĊ", "ab", "abc"]
VOCABULARY = {text: id for id, text in enumerate(dict.fromkeys(ALPHABET + WORDS))}
TOKENIZER = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
TOKENIZER.decoder = decoders.ByteLevel()

HALVES = [ALPHABET[200], ALPHABET[130]]  # bytes that are no character by themselves


def ids(text):
    """One token per byte."""
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer.encode(text).ids


def tokens_of(word):
    """One token for what is a word or a byte, one per byte for a character of several."""
    return ids(word) if word in "é€" else [VOCABULARY[word]]


@pytest.mark.parametrize(
    "stop, tokens, strings",
    [
        (None, {7, 9}, ()),
        ([], set(), ()),
        ("done", set(), ("done",)),
        (["a", "b"], set(), ("a", "b")),
        ([5, 6], {5, 6}, ()),
        ("", set(), ()),
    ],
)
def test_only_a_missing_stop_means_end_of_text(stop, tokens, strings):
    assert stop_rule(stop, END_OF_TEXT) == StopRule(frozenset(tokens), strings)


def test_the_device_checks_at_most_eight_stop_tokens():
    assert stop_rule([3, 1], ()).device_tokens == [1, 3, -1, -1, -1, -1, -1, -1]
    assert len(stop_rule(list(range(20)), ()).device_tokens) == 8


def test_a_stop_token_belongs_to_the_sample():
    watch = StopWatch(stop_rule([5], ()), None)
    assert watch.end([1, 2]) is None
    assert watch.end([3, 5, 5, 4]) == 2


def test_a_string_ends_with_the_token_that_completes_it():
    watch = StopWatch(stop_rule("the end", ()), TOKENIZER)
    tokens = [*ids("it is"), VOCABULARY["Ġthe"], *ids(" en"), *ids("d, or not")]
    assert watch.end(tokens) == len(tokens) - len("or not") - 2


def test_a_string_may_be_spread_over_many_calls():
    watch = StopWatch(stop_rule("abcdefghij", ()), TOKENIZER)
    assert [watch.end([token]) for token in ids("xxabcdefghij")] == [None] * 11 + [1]


def test_a_character_that_is_not_complete_does_not_hide_the_string_before_it():
    newline_then_half_a_character = [VOCABULARY["Ċ"], *ids("é")[:1]]
    assert StopWatch(stop_rule("\n", ()), TOKENIZER).end(newline_then_half_a_character) == 1


def test_the_string_wins_when_it_is_complete_before_the_stop_token():
    rule = StopRule(tokens=frozenset(ids("z")), strings=("b",))
    assert StopWatch(rule, TOKENIZER).end(ids("abyz")) == 2
    assert StopWatch(rule, TOKENIZER).end(ids("ayzb")) == 3


@given(
    text=st.lists(
        st.sampled_from(["a", "b", "ab", "abc", "é", "€", "Ċ", "ĊĊ", "Ġend", *HALVES]), max_size=30
    ),
    cuts=st.sets(st.integers(0, 30)),
    stop=st.sampled_from(["ab", "abab", "\n\n", "é", "b\n", " end", "é€", "ba€b", "aab" * 3]),
)
def test_the_end_is_the_same_however_the_tokens_are_dealt_out(text, cuts, stop):
    tokens = [id for word in text for id in tokens_of(word)]
    whole = [TOKENIZER.decode(tokens[:count], skip_special_tokens=False) for count in range(len(tokens) + 1)]
    expected = next((count for count, decoded in enumerate(whole) if stop in decoded), None)

    watch, found, start = StopWatch(stop_rule(stop, ()), TOKENIZER), None, 0
    for cut in [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]:
        end = watch.end(tokens[start:cut])
        if end is not None:
            found = start + end
            break
        start = cut
    assert found == expected


class CountingDecoder:
    """Counts the tokens that it decodes."""

    def __init__(self):
        self.count = 0

    def decode(self, ids, skip_special_tokens=True):
        self.count += len(ids)
        return TOKENIZER.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("word", ["a", "é", HALVES[0], "Ċ"])
@pytest.mark.parametrize("length", [1, 1000])
def test_the_work_per_token_depends_on_neither_the_strings_nor_the_sample(word, length):
    decoder = CountingDecoder()
    watch = StopWatch(stop_rule(["x" * length, "y" * length], ()), decoder)
    tokens = tokens_of(word) * 3200
    for start in range(0, len(tokens), 16):
        assert watch.end(tokens[start : start + 16]) is None
    assert decoder.count < 8 * len(tokens)


@pytest.mark.parametrize("word", ["a", "é", HALVES[0]])
def test_the_work_per_token_of_a_text_does_not_grow(word):
    decoder = CountingDecoder()
    detokenizer = Detokenizer(decoder)
    tokens = tokens_of(word) * 3200
    text = "".join(detokenizer.add(tokens[start : start + 16]) for start in range(0, len(tokens), 16))
    assert text + detokenizer.end() == TOKENIZER.decode(tokens)
    assert decoder.count < 20 * len(tokens)
