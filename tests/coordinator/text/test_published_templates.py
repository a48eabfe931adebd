"""Published chat templates go on behind a sampled turn, as they are or with the history kept.

Run by ``CHAT_TEMPLATES=FOLDER pytest tests/coordinator/text/test_published_templates.py``, with a folder of
``*.jinja``, such as ``vendor/llama.cpp/models/templates`` of llama-cpp-python's source, or
``trl/chat_templates`` of trl.
"""

import json
import os
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from spmd_tx.coordinator.conversation.messages import Message
from spmd_tx.coordinator.text import continuation
from spmd_tx.coordinator.text.continuation import EARLIER, TurnEnd
from spmd_tx.coordinator.text.model_text import load_model_text
from spmd_tx.coordinator.text.reply_formats import Channels
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest

FOLDER = os.environ.get("CHAT_TEMPLATES", "")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
MARKER = re.compile(
    r"<\|[a-z_]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|</?(?:think|tool_call|arg_key|arg_value)>|</?s>"
)
ENDS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|return|>", "<|user|>", "</s>")
QUESTION = "And what else?"

pytestmark = pytest.mark.skipif(not FILES, reason="CHAT_TEMPLATES names no folder with templates")


def model_of(source, directory):
    """A model with this template, in whose vocabulary its markers are tokens."""
    tiny_model.write(directory)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    markers = {
        *MARKER.findall(source),
        "<s>",
        "</s>",
    }  # which the tokenizer writes where a template names them
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in sorted(markers)]
    )
    tokenizer.save(str(path))
    (directory / "chat_template.jinja").write_text(source)
    end = next(each for each in ENDS if each in markers)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_model_text(directory)


def tail_behind(text, messages, known, **how):
    traits, format = text.template_traits, text.reply_format
    drops_reasoning = format is not None and format.reasoning is not None
    turns = continuation.to_render(messages, known, traits, drops_reasoning=drops_reasoning)
    parts = text.template.render_parts(turns.messages, turns.known, {}, 1 << 20, 20)
    ends = tuple(text.turn_ends.values())
    return continuation.tail(parts, TurnEnd(ends[0], ends, messages[known - 1].reasoning, **how))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_follows_a_turn_is_found(file, tmp_path):
    text = model_of(file.read_text(), tmp_path)
    format = text.reply_format
    thinks = format is not None and (format.reasoning is not None or isinstance(format.calls, Channels))
    new = (Message("user", QUESTION),)
    answer = Message("assistant", "I see.", reasoning="Hm." if thinks else "")
    try:
        tail = tail_behind(text, (Message("user", "Look."), answer, *new), 2)
        if tail is None:
            tail = tail_behind(text, *continuation.behind_plain_turn(new), words=EARLIER)
    except InvalidRequest as refusal:
        pytest.skip(f"the template refuses the conversation: {refusal}")
    if tail is None and not any(each in file.read_text() for each in (*ENDS, "eos_token")):
        pytest.skip("its turns end with a token that is not known here")
    assert tail is not None
    assert QUESTION in tail.text
    assert "I see." not in tail.text
    assert EARLIER not in tail.text
