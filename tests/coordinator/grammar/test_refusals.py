import pytest

from spmd_tx.coordinator.conversation.messages import Conversation, Tool
from spmd_tx.coordinator.grammar.answer_grammars import AnswerStart, answer_grammar
from spmd_tx.coordinator.grammar.compiler import CompiledGrammar, compile_source
from spmd_tx.coordinator.grammar.constraints import ANY_CALL, Constraint, JsonAnswer, TextPattern
from spmd_tx.coordinator.grammar.refusals import MOST_OPTIONAL
from spmd_tx.errors import InvalidRequest
from tests.support.letter_tokenizer import END, VOCABULARY, letters

PLAIN = AnswerStart(None, "", {})
NOBODY = Conversation(())


def written(constraint, conversation=NOBODY):
    return compile_source(letters(), answer_grammar(constraint, conversation, PLAIN))


def optional(count, required=(), letter="p"):
    names = [f"{letter}{number}" for number in range(count)]
    return {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in [*names, *required]},
        "required": [*required],
    }


@pytest.mark.parametrize(
    "schema",
    [
        optional(MOST_OPTIONAL),
        optional(MOST_OPTIONAL, required=["first", "second"]),
        optional(MOST_OPTIONAL) | {"additionalProperties": False},
    ],
)
def test_an_object_of_many_optional_properties_is_followed_to_its_end(schema):
    guide = CompiledGrammar(written(Constraint(JsonAnswer(schema))), VOCABULARY).guide(
        [END], is_cautious=False
    )
    text = "{" + ", ".join(f'"p{number}": true' for number in (0, 3, MOST_OPTIONAL - 2))
    for required in schema["required"]:
        text += f', "{required}": false'
    tokens = [*letters().tokenize_str(text + "}"), END]
    assert guide.take(tokens) == len(tokens)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_object_of_more_is_refused_before_it_is_compiled(depth):
    schema = optional(MOST_OPTIONAL + 1)
    for _ in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema}], "enum": [{"properties": 5}]}
    said = f"{MOST_OPTIONAL + 1} optional properties; at most {MOST_OPTIONAL} "
    with pytest.raises(InvalidRequest, match=said):
        answer_grammar(Constraint(JsonAnswer(schema)), NOBODY, PLAIN)


def test_a_tool_of_more_is_refused_too():
    conversation = Conversation((), (Tool("look", "", optional(MOST_OPTIONAL + 1)),))
    with pytest.raises(InvalidRequest, match="optional properties"):
        answer_grammar(Constraint(must_call=ANY_CALL), conversation, PLAIN)


@pytest.mark.parametrize(
    "form, said",
    [
        (JsonAnswer({"type": "nothing"}), "the type nothing, which JSON does not have"),
        (JsonAnswer({"enum": []}), "no value is valid by the schema of the answer (anyOf is empty)"),
        (JsonAnswer({"$ref": "#"}), "a place where no text can follow"),
        (
            JsonAnswer({"$ref": "http://a/"}),
            "names http://a/, which is not in the schema; nothing is fetched",
        ),
        (JsonAnswer({"$ref": "#/nowhere"}), "names /nowhere, which is not in the schema; put it into $defs"),
        (
            JsonAnswer({"type": "string", "pattern": "("}),
            "a pattern of a schema, cannot be read: unclosed group",
        ),
        (JsonAnswer({"enum": 5}), "the schema of the answer cannot be read: enum must be an array; send"),
        (
            JsonAnswer({"type": "integer", "minimum": -(10**40)}),
            "bounds of a number in the schema are too large",
        ),
        (JsonAnswer({"not": {}}, is_strict=True), 'the keywords "not", which cannot be enforced'),
        (
            JsonAnswer({"anyOf": [optional(900, letter=letter) for letter in "pq"]}),
            "allows too many ways to go on at one place",
        ),
        (TextPattern("regex", "(?=a)b"), "looks ahead or behind"),
        (TextPattern("regex", "[^\\s\\S]"), "a place where no text can follow"),
        (TextPattern("lark", "start: other"), 'names "other", which has no rule'),
        (
            TextPattern("lark", "start: <think>"),
            'names the special token "<think>", which the model does not',
        ),
        (TextPattern("lark", "start: %json {"), "the grammar of the answer cannot be read: 2(12): Unmatched"),
    ],
)
def test_a_refusal_says_the_reason_in_words_of_the_request(form, said):
    with pytest.raises(InvalidRequest) as refused:
        written(Constraint(form))
    assert said in str(refused.value)
    assert "x-guidance" not in str(refused.value)
