import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.http.text_generation.detokenize import (
    Detokenizer,
    SampleText,
    TextUntilStop,
)


class Bytes:
    """Decodes token n to the byte n; tokens from 256 on are special."""

    def decode(self, ids, skip_special_tokens=True):
        special = b"" if skip_special_tokens else b"<>"
        return b"".join(bytes([id]) if id < 256 else special for id in ids).decode(errors="replace")


def pieces(text, tokens):
    return [text.add([token]) for token in tokens] + [text.end()]


def test_a_character_comes_when_all_of_its_bytes_are_there():
    tokens = "a😀é".encode()
    assert pieces(Detokenizer(Bytes()), tokens) == ["a", "", "", "", "😀", "", "é", ""]


def test_what_never_becomes_a_character_comes_at_the_end():
    assert pieces(Detokenizer(Bytes()), "a😀".encode()[:3]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_no_text():
    assert pieces(Detokenizer(Bytes()), [256, *b"a", 300, *b"b", 256]) == ["", "a", "", "b", "", ""]


def test_special_tokens_do_not_break_a_character():
    first, *others, last = "😀".encode()
    assert pieces(Detokenizer(Bytes()), [first, *others, 256, 256, last]) == [*5 * [""], "😀", ""]


def test_a_space_that_begins_a_text_is_dropped_once():
    class Metaspace:
        """As those of SentencePiece: token 0 is a space, and token 1 is a letter behind one."""

        def decode(self, ids, skip_special_tokens=True):
            return "".join((" ", " a")[id] for id in ids).removeprefix(" ")

    assert pieces(Detokenizer(Metaspace()), [0, 1, 0, 1]) == ["", " a", " ", " a", ""]


@given(st.text(), st.lists(st.integers(0, 5)))
def test_pieces_of_any_size_add_up_to_the_text(text, sizes):
    tokens, detokenizer, told = list(text.encode()), Detokenizer(Bytes()), ""
    for size in sizes:
        told += detokenizer.add(tokens[:size])
        assert text.startswith(told)
        tokens = tokens[size:]
    assert told + detokenizer.add(tokens) + detokenizer.end() == text


@given(st.lists(st.integers(0, 260)))
def test_pieces_of_any_bytes_add_up_to_what_they_decode_to(tokens):
    assert "".join(pieces(Detokenizer(Bytes()), tokens)) == Bytes().decode(tokens)


@pytest.mark.parametrize(
    "stops, arrivals, told",
    [
        ([], ["a", "b"], ["a", "b", ""]),
        (["END"], ["xE", "ND", "y"], ["x", "", "", ""]),
        (["END"], ["xE", "Ny", "z"], ["x", "ENy", "z", ""]),
        (["END"], ["xEN"], ["x", "EN"]),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""]),
        (["long one", "n"], ["lo", "ng"], ["", "lo", ""]),
        (["b", "ab"], ["xab"], ["x", ""]),
    ],
)
def test_text_ends_before_the_first_stop_string(stops, arrivals, told):
    text = TextUntilStop(stops)
    assert [text.add(piece) for piece in arrivals] + [text.end()] == told


@given(st.text("ab\n", max_size=12), st.text("ab\n", max_size=12), st.integers(1, 9))
def test_stop_strings_in_an_echoed_prompt_end_nothing(prompt, sample, step):
    alone = "".join(pieces(SampleText(Bytes(), ["ab"]), sample.encode()))
    text, tokens = SampleText(Bytes(), ["ab"], prompt_tokens=len(prompt)), list((prompt + sample).encode())
    arrivals = [tokens[start : start + step] for start in range(0, len(tokens), step)]
    told = "".join([text.add(each) for each in arrivals] + [text.end()])
    assert told == prompt + alone
    assert text.length == len(tokens)


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_any_text_is_cut_where_the_stop_string_begins_that_is_complete_first(text, stops):
    told = "".join(pieces(SampleText(Bytes(), stops), text.encode()))
    completed = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not completed:
        assert told == text
        return
    first = text[: min(completed)]
    assert told == text[: min(first.find(stop) for stop in stops if stop in first)]
