"""Grammars of whole answers in each family's format: random draws within them are read back by its reader."""

import json
from functools import cache

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from spmd_tx.coordinator.conversation.messages import Conversation, Tool
from spmd_tx.coordinator.grammar.answer_grammars import AnswerStart, answer_grammar
from spmd_tx.coordinator.grammar.compiler import CompiledGrammar, compile_source
from spmd_tx.coordinator.grammar.constraints import ANY_CALL, Constraint
from spmd_tx.coordinator.text.replies import reply_reader
from spmd_tx.coordinator.text.reply_events import ReplyCall, ReplyContent, ReplyStatus
from spmd_tx.coordinator.text.reply_formats import find_format
from spmd_tx.demo import tiny_model
from tests.support.reply_templates import FAMILIES

LOOK = Tool(
    "look",
    "",
    {
        "type": "object",
        "properties": {
            "where": {"type": "string", "maxLength": 8},
            "depth": {"type": "integer", "minimum": 0, "maximum": 99},
            "how": {"enum": ["near", "far"]},
        },
        "required": ["where", "depth"],
        "additionalProperties": False,
    },
)
WAIT = Tool("wait", "", {"type": "object", "properties": {}, "additionalProperties": False})
MARKERS = """
<think> </think> [THINK] [/THINK] <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>
<|python_tag|> [TOOL_CALLS] [ARGS] <|tool_calls_section_begin|> <|tool_calls_section_end|>
<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <|channel|> <|message|> <|start|> <|end|>
<|constrain|> <|call|> <|return|>
""".split()
MOST_TOKENS = 400
CALLERS = [name for name in FAMILIES if name != "mistral"]


@cache
def vocabulary(tmp_path_factory_dir: str, has_special_tokens: bool):
    """Return a tokenizer whose markers are special tokens or plain text, and the end's ID."""
    tokenizer = Tokenizer.from_file(f"{tmp_path_factory_dir}/tokenizer.json")
    if has_special_tokens:
        tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    end = tokenizer.token_to_id("<|im_end|>")
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return tokenizer, LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[end]), end


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model.write(path, tiny_model.Spec(vocab_size=512))
    return str(path)


@pytest.fixture(params=[True, False], ids=["special tokens", "plain markers"])
def words(request, directory):
    return vocabulary(directory, request.param)


def start_of(family, words, prompt):
    tokenizer, of_grammars, _ = words
    added = {id: each.content for id, each in tokenizer.get_added_tokens_decoder().items()}
    special = {text: id for id, text in added.items() if of_grammars.is_special_token(id)}
    format = None if family is None else find_format(FAMILIES[family], list(special))
    return AnswerStart(format, prompt, special)


def random_answer(source, words, seed):
    """Draw uniformly among what the grammar allows; return the text, and whether it came to its end."""
    tokenizer, of_grammars, end = words
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    guide = CompiledGrammar(compile_source(of_grammars, source), size).guide([end], is_cautious=False)
    random, drawn = np.random.default_rng(seed), list[int]()
    while len(drawn) < MOST_TOKENS and end not in drawn:
        if guide.ahead:
            token = guide.ahead[0]
        else:
            allowed = np.flatnonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little")[:size])
            special = [each for each in allowed if of_grammars.is_special_token(int(each))]
            # Free text would hardly ever end by itself.
            token = int(random.choice(special if special and random.random() < 0.5 else allowed))
        assert guide.take([token]) == 1
        drawn.append(token)
    return tokenizer.decode(drawn, skip_special_tokens=False), drawn[-1] == end


def read(start, text, tools):
    reader = reply_reader(start.format, start.prompt, tools)
    events = [*reader.feed(text), *reader.end()]
    return events, reader.status


def finished(source, words, count=3):
    answers = [random_answer(source, words, seed) for seed in range(3 * count)]
    texts = [text.replace("<|im_end|>", "") for text, is_whole in answers if is_whole]
    assert texts, "hardly any answer has come to its end"
    return texts[:count]


def check_calls(events, names):
    calls = [event for event in events if isinstance(event, ReplyCall)]
    assert calls
    for call in calls:
        arguments = json.loads(call.arguments)
        assert call.name in names
        if call.name == "look":
            assert set(arguments) <= {"where", "depth", "how"}
            assert isinstance(arguments["where"], str)
            assert 0 <= arguments["depth"] <= 99
            assert arguments.get("how", "far") in ("near", "far")
        else:
            assert arguments == {}
    return calls


@pytest.mark.parametrize("family", CALLERS)
@pytest.mark.parametrize("choice", [ANY_CALL, "look"])
def test_a_call_that_must_come_is_read_in_every_format(family, choice, words):
    conversation = Conversation((), (LOOK, WAIT))
    start = start_of(family, words, "")
    if start.format is None or start.format.calls is None:
        pytest.skip("the template of this family shows no calls")
    source = answer_grammar(Constraint(must_call=choice), conversation, start)
    for text in finished(source, words):
        events, status = read(start, text, conversation.tools)
        check_calls(events, {choice} if choice else {"look", "wait"})
        assert status is ReplyStatus.OK
        if family != "gpt_oss":  # which may remark something before
            assert not any(isinstance(event, ReplyContent) and event.text.strip() for event in events)
