"""A vocabulary of single letters, so that every text has one tokenization, for the fake device."""

import functools
import json

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from spmd_tx.coordinator.grammar.compiler import CompiledGrammar

LETTERS = [chr(32 + number) for number in range(95)]
TOKENS = [*(letter.encode() for letter in LETTERS), b"\n", b"</s>"]
END = 96
VOCABULARY = 97


class _Letters:
    def __init__(self):
        self.eos_token_id, self.bos_token_id = END, None
        self.tokens, self.special_token_ids = TOKENS, [END]

    def __call__(self, text):
        return [TOKENS.index(bytes([each])) for each in text.encode()]


@functools.cache
def letters():
    """Return the vocabulary."""
    return LLTokenizer(TokenizerWrapper(_Letters()), n_vocab=VOCABULARY)


def compiled(source):
    """Return a grammar over these letters."""
    matcher = LLMatcher(letters(), LLMatcher.grammar_from_lark(source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return CompiledGrammar(matcher, VOCABULARY)


def of_schema(schema):
    """Return a grammar of JSON without free blanks."""
    guidance = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return compiled(f"start: %json {json.dumps({**schema, 'x-guidance': guidance})}")


def text_of(tokens):
    """Return the text of tokens, without the end."""
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()
