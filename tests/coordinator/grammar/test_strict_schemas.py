"""What a strict schema may say although a grammar does not know it."""

import pytest
from llguidance import LLTokenizer

from spmd_tx.coordinator.grammar.call_grammars import Rules
from spmd_tx.coordinator.grammar.compiler import compile_source
from spmd_tx.coordinator.grammar.strict_schemas import FORMATS, enforceable
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tiny_model.train_tokenizer(512, seed=0)
    end = tokenizer.token_to_id("<|im_end|>")
    return LLTokenizer(tokenizer.to_str(), n_vocab=512, eos_token=[end])


def compiled(tokenizer, schema):
    rules = Rules({})
    body = rules.json(schema, is_strict=True)
    return compile_source(tokenizer, "\n".join([f"start: {body}", *rules.lines, ""]))


def test_remarks_are_left_out_and_nothing_else():
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "path"},
            "uniqueItems": {"type": "array", "uniqueItems": False, "items": {"format": "binary"}},
            "day": {"anyOf": [{"type": "string", "format": "date"}, {"const": {"format": "path"}}]},
        },
        "enum": [{"format": "path", "uniqueItems": False}],
    }
    assert enforceable(schema) == {
        "type": "object",
        "properties": {
            "format": {"type": "string"},
            "uniqueItems": {"type": "array", "items": {}},
            "day": {"anyOf": [{"type": "string", "format": "date"}, {"const": {"format": "path"}}]},
        },
        "enum": [{"format": "path", "uniqueItems": False}],
    }


@pytest.mark.parametrize("format", [*sorted(FORMATS), "path", "uri-reference", "password"])
def test_every_format_is_enforced_or_a_remark(tokenizer, format):
    compiled(tokenizer, {"type": "string", "format": format})


@pytest.mark.parametrize(
    "schema, said",
    [
        ({"type": "array", "uniqueItems": True}, 'keywords "uniqueItems", which cannot be enforced'),
        ({"type": "object", "if": {}}, 'keywords "if", which cannot be enforced'),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf .* write anyOf"),
    ],
)
def test_what_cannot_be_enforced_is_named_with_the_remedy(tokenizer, schema, said):
    with pytest.raises(InvalidRequest, match=said):
        compiled(tokenizer, schema)
