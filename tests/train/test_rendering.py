import pytest

from spmd_tx.errors import StartError
from spmd_tx.train.rendering import Renderer
from spmd_tx.train.rows import ChatRow, CompletionRow, PreferenceRow, TextRow

END = 1  # of a text


class Characters:
    """A tokenizer whose tokens are characters, with the chat template of a caller."""

    eos_token_id = END

    def __init__(self, template):
        self.template = template

    def encode(self, text, add_special_tokens=True):
        return [2] * add_special_tokens + [ord(each) for each in text]

    def apply_chat_template(self, messages, *, tools, tokenize, add_generation_prompt):
        assert not tokenize
        return self.template(messages, add_generation_prompt)

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(token) for token in tokens)


def plain(messages, is_asked):
    text = "".join(f"<{each['role'][0]}>{each['content']}|\n" for each in messages)
    return text + ("<a>" if is_asked else "")


def thoughtless(messages, is_asked):
    """As reasoning models do: what was thought in earlier turns is left out."""
    last = max(place for place, each in enumerate(messages) if each["role"] == "user")
    shown = [
        {**each, "content": each["content"].split("]")[-1]} if place < last else each
        for place, each in enumerate(messages)
    ]
    return plain(shown, is_asked)


def strict(messages, is_asked):
    raise ValueError("roles must alternate")


def otherwise(messages, is_asked):
    return "question" if is_asked else "something else"


def message(role, content):
    return {"role": role, "content": content}


def learned(renderer, row):
    """Each sequence as its text, and the text of what is learned of it."""
    return [
        (
            "".join(chr(token) for token in each.tokens),
            "".join(
                chr(token)
                for token, is_learned in zip(each.tokens, each.is_learned, strict=True)
                if is_learned
            ),
        )
        for each in renderer.sequences(row)
    ]


TALK = [
    message("user", "a"),
    message("assistant", "[x]b"),
    message("user", "c"),
    message("assistant", "[y]d"),
]


def test_all_answers_of_a_conversation_are_learned_in_one_sequence():
    (found,) = learned(Renderer(Characters(plain)), ChatRow(TALK))
    assert found == ("<u>a|\n<a>[x]b|\n<u>c|\n<a>[y]d|", "[x]b|[y]d|")


def test_a_template_that_shows_earlier_turns_otherwise_gets_a_sequence_per_answer():
    first, second = learned(Renderer(Characters(thoughtless)), ChatRow(TALK))
    assert first == ("<u>a|\n<a>[x]b|", "[x]b|")
    assert second == ("<u>a|\n<a>b|\n<u>c|\n<a>[y]d|", "[y]d|")


def test_texts_and_completions_end_with_the_token_of_the_end():
    renderer = Renderer(Characters(plain))
    assert learned(renderer, CompletionRow("a", "b")) == [("\x02ab\x01", "b\x01")]
    assert learned(renderer, TextRow("a")) == [("\x02a\x01", "\x02a\x01")]


def test_of_preferences_only_the_answers_are_learned():
    row = PreferenceRow(TALK[:1], TALK[1:2], [message("assistant", "no")])
    chosen, rejected = Renderer(Characters(plain)).pair(row)
    assert (chosen.count, rejected.count) == (5, 3)
    assert chosen.tokens[: -chosen.count] == rejected.tokens[: -rejected.count]


def test_what_is_too_long_is_cut_and_left_out_if_nothing_learned_is_left():
    assert learned(Renderer(Characters(plain), 4), CompletionRow("a", "bcd")) == [("\x02abc", "bc")]
    assert learned(Renderer(Characters(plain), 4), CompletionRow("abcd", "e")) == []


@pytest.mark.parametrize(
    "template, message",
    [(strict, "refuses a conversation: roles must alternate"), (otherwise, "cannot be told")],
)
def test_a_template_that_does_not_fit_is_an_error(template, message):
    with pytest.raises(StartError, match=message):
        Renderer(Characters(template)).sequences(ChatRow(TALK))
