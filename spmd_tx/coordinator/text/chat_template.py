"""Renders a conversation as the model wants it: the chat template of its tokenizer, as transformers does it.

Templates are written for transformers, so its environment is rebuilt here: a sandbox, the same filters,
functions and tags. Importing transformers for it would take seconds and may bring PyTorch or JAX with it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spmd_tx.errors import InvalidRequest

TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
DEFAULT = "default"  # the template of this name, if there are several

# What a template can do wrong with a conversation that it was not written for.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)

Message = Mapping[str, Any]


class ChatTemplate:
    """May be missing: then every conversation is refused."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    def render(
        self, messages: Sequence[Message], options: Mapping[str, Any], most_characters: int, seconds: float
    ) -> str:
        """The prompt for the assistant's next message. Raises InvalidRequest."""
        variables = {**self._special_tokens, **options, "messages": messages, "add_generation_prompt": True}
        pieces: list[str] = []
        length, end = 0, time.monotonic() + seconds
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > most_characters or time.monotonic() > end:
                    raise InvalidRequest(
                        "the model's chat template makes too much of this conversation: more than "
                        f"{most_characters} characters, or {seconds:g} s of work; shorten it"
                    )
            return "".join(pieces)
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template cannot render this conversation: {error}; change messages or "
                "chat_template_kwargs, or use /completions with a prompt of your own"
            ) from error

    @cached_property
    def _template(self) -> Template:
        if self._source is None:
            raise InvalidRequest(
                f"this model has no chat template; use /completions, or the operator adds {TEMPLATE} to the "
                "model's directory"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self._source)


class _Generation(Extension):
    """``{% generation %}`` marks, for training, what the assistant has said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_chat_template(directory: Path) -> ChatTemplate:
    """The template of the model in this directory. Blocks."""
    config = _read_json(directory / TOKENIZER_CONFIG)
    special_tokens = {
        name: text for name in config if name.endswith("_token") and (text := _token_text(config[name]))
    }
    path = directory / TEMPLATE
    source = path.read_text() if path.is_file() else _default_template(config.get("chat_template"))
    return ChatTemplate(source, special_tokens)


def _default_template(entry: object) -> str | None:
    if not isinstance(entry, list):
        return entry if isinstance(entry, str) else None
    return next((each["template"] for each in entry if each["name"] == DEFAULT), None)


def _token_text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # the model can be trained and sampled without it
    return content if isinstance(content, dict) else {}


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **more: Any) -> str:
    """Unlike jinja2's own, it does not escape what is special in HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **more)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
