"""Renders a conversation with the chat template of a model's tokenizer, within limits on time and length."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from spmd_tx.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "chat_template.jinja"

# What a template can do wrong with a conversation that it was not written for.
TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    RecursionError,
)
# What apply_chat_template takes besides the template's variables.
NOT_FOR_CLIENTS = frozenset(
    """
    conversation messages chat_template continue_final_message tokenize sanitize_control_tokens padding
    truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    """.split()
)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class _Limits:
    """Holds the limits of the rendering under way."""

    characters: int
    seconds: float
    end: float  # on the monotonic clock


_limits: ContextVar[_Limits | None] = ContextVar("limits of rendering", default=None)


class ChatTemplate:
    """Applies the template of a tokenizer; it may have none, and then every conversation is refused."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def render(
        self, messages: Sequence[Message], options: Mapping[str, Any], most_characters: int, seconds: float
    ) -> str:
        """Render the prompt for the assistant's next message. Raises InvalidRequest."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                f"this model has no chat template; use /completions, or the operator adds {TEMPLATE} to the "
                "model's directory"
            )
        _check(options)
        limited = _limits.set(_Limits(most_characters, seconds, time.monotonic() + seconds))
        try:
            self._limit_template(options.get("tools"))
            text: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                **{**options, "tokenize": False, "add_generation_prompt": True},
            )
            return text
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template cannot render this conversation: {error}; change messages or "
                "chat_template_kwargs, or use /completions with a prompt of your own"
            ) from error
        finally:
            _limits.reset(limited)

    def _limit_template(self, tools: Any) -> None:
        """Put the limits into the environment that apply_chat_template uses: transformers keeps it."""
        from transformers.utils import chat_template_utils

        source = self._tokenizer.get_chat_template(tools=tools)
        environment: Any = chat_template_utils._compile_jinja_template(source).environment
        environment.concat = _concat


def _check(options: Mapping[str, Any]) -> None:
    refused = sorted(NOT_FOR_CLIENTS & options.keys())
    if refused:
        raise InvalidRequest(f"chat_template_kwargs cannot set {', '.join(refused)}; leave that out")


def _concat(pieces: Iterable[str]) -> str:
    """Join the pieces of a template's output, as jinja2 does, within the limits."""
    limits = _limits.get()
    if limits is None:
        return "".join(pieces)
    found: list[str] = []
    length = 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > limits.characters or time.monotonic() > limits.end:
            raise InvalidRequest(
                "the model's chat template makes this conversation too long: more than "
                f"{limits.characters} characters, or {limits.seconds:g} s of work; shorten it"
            )
    return "".join(found)
