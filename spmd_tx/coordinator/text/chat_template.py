"""Renders a conversation with the chat template of a model's tokenizer, within limits on time and length.

What a template leaves out, a model never sees. So each part of a conversation is rendered, or the
conversation is refused with the name of the part. What a template drops only as a conversation goes on, such
as the reasoning of earlier turns, is its own rule.
"""

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, meta

from spmd_tx.coordinator.text import conversation
from spmd_tx.coordinator.text.conversation import Marks, TemplateMessage, ValuePlace
from spmd_tx.errors import InvalidRequest, NotRendered, WrongField

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "chat_template.jinja"
OPTIONS, GENERATION_PROMPT = "chat_template_kwargs", "add_generation_prompt"

ATTEMPT_CHARACTERS, ATTEMPT_SECONDS = 1 << 16, 2.0

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


@dataclass(frozen=True)
class RenderedParts:
    """Holds the prompt of a conversation, and of its beginning what is needed to find its end in it."""

    whole: str
    head: str | None = None  # up to the last known turn; None: the template refuses it
    before: str | None = None  # the prompt of that turn, if the prompt does not begin with the head


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

    @property
    def source(self) -> str:
        """The template's text, of several that for tools; "" if there is none."""
        if not self._tokenizer.chat_template:
            return ""
        try:
            return self._tokenizer.get_chat_template(tools=[{}])
        except ValueError:  # there are several, and none for this
            return ""

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads; none if it cannot be read."""
        try:
            return _variables(*self._compile(self.source)) if self.source else frozenset()
        except TEMPLATE_ERRORS:
            return frozenset()

    def attempt(self, messages: Sequence[TemplateMessage], **options: Any) -> str | None:
        """Render a short conversation as it is; None if the template refuses it."""
        limits = _Limits(ATTEMPT_CHARACTERS, ATTEMPT_SECONDS, time.monotonic() + ATTEMPT_SECONDS)
        limited = _limits.set(limits)
        try:
            self._prepare(options)
            return self._apply(messages, options)
        except (InvalidRequest, *TEMPLATE_ERRORS):
            return None
        finally:
            _limits.reset(limited)

    def render(
        self,
        messages: Sequence[TemplateMessage],
        options: Mapping[str, Any],
        most_characters: int,
        seconds: float,
    ) -> str:
        """Render the prompt for the assistant's next message. Raises InvalidRequest."""
        return self.render_parts(messages, None, options, most_characters, seconds).whole

    def render_parts(
        self,
        messages: Sequence[TemplateMessage],
        known: int | None,
        options: Mapping[str, Any],
        most_characters: int,
        seconds: float,
    ) -> RenderedParts:
        """Render the prompt, and the first ``known`` messages alone, spelled alike. Raises InvalidRequest."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                f"this model has no chat template; use /completions, or the operator adds {TEMPLATE} to the "
                "model's directory"
            )
        limited = _limits.set(_Limits(most_characters, seconds, time.monotonic() + seconds))
        try:
            source = self._prepare(options)
            whole, spelled = self._rendered(messages, {**options, GENERATION_PROMPT: True}, source)
            if known is None:
                return RenderedParts(whole)
            head = self._part(spelled[:known], {**options, GENERATION_PROMPT: False})
            if head is not None and whole.startswith(head):
                return RenderedParts(whole, head)
            before = self._part(spelled[: known - 1], {**options, GENERATION_PROMPT: True})
            return RenderedParts(whole, head, before)
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template cannot render this conversation: {error}; change messages or "
                "chat_template_kwargs, or use /completions with a prompt of your own"
            ) from error
        finally:
            _limits.reset(limited)

    def _prepare(self, options: Mapping[str, Any]) -> str:
        """Check the options, and return the template's text."""
        _check_names(options)
        source = self._tokenizer.get_chat_template(tools=options.get("tools"))
        unknown = sorted(options.keys() - _variables(*self._compile(source)) - {GENERATION_PROMPT})
        if unknown:
            raise WrongField(
                f"the model's chat template has no variable {', '.join(unknown)}; leave that out", OPTIONS
            )
        return source

    def _compile(self, source: str) -> tuple[Any, str]:
        """Return the environment that transformers keeps for the template, with the limits in it."""
        from transformers.utils import chat_template_utils

        environment: Any = chat_template_utils._compile_jinja_template(source).environment
        environment.concat = _concat
        return environment, source

    def _part(self, messages: Sequence[TemplateMessage], options: Mapping[str, Any]) -> str | None:
        try:
            return self._apply(messages, options)
        except TEMPLATE_ERRORS:
            return None

    def _rendered(
        self, messages: Sequence[TemplateMessage], options: Mapping[str, Any], source: str
    ) -> tuple[str, list[dict[str, Any]]]:
        """Render the first spelling of the conversation that loses nothing, and return the spelling, too."""
        errors, lost = list[Exception](), list[ValuePlace]()
        for spelled in conversation.spellings(messages, source):
            try:
                text = self._apply(spelled, options)
            except TEMPLATE_ERRORS as error:
                errors.append(error)
                continue
            first_lost = self._lost(spelled, options)
            if first_lost is None:
                return text, spelled
            lost.append(first_lost)
        if lost:
            raise _not_rendered(lost[0])
        broken = conversation.broken_arguments(messages)
        if broken is not None:
            raise NotRendered(
                f"message {broken.message}: {broken.path} is no JSON object, and the model's chat template "
                f"takes nothing else ({errors[0]}); send an object, or write the call into the content"
            )
        raise errors[0]

    def _apply(self, messages: Sequence[TemplateMessage], options: Mapping[str, Any]) -> str:
        text: Any = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], **{**options, "tokenize": False}
        )
        return text

    def _lost(self, messages: Sequence[TemplateMessage], options: Mapping[str, Any]) -> ValuePlace | None:
        """Return a place of the conversation whose text the template leaves out."""
        marks = Marks()
        marked = marks.marked(messages)
        if "tools" in options:
            options = {**options, "tools": marks.tools(options["tools"])}
        numbers = conversation.numbers(messages)
        try:
            text = self._apply(marked, options)
            if numbers and self._apply(conversation.without_numbers(marked), options) == text:
                return numbers[0]
        except TEMPLATE_ERRORS:
            return None  # it reads into the texts, and so it renders them
        latest = {marks.places[number].kind: number for number in marks.missing(text)}
        for number in latest.values():
            place = marks.places[number]
            if place.message is None or not self._shows_at_first(number, marks, marked, options):
                return place
        return None

    def _shows_at_first(
        self, number: int, marks: Marks, marked: Sequence[TemplateMessage], options: Mapping[str, Any]
    ) -> bool:
        """Return whether a text is rendered while its message is the last one."""
        last = marks.places[number].message
        assert last is not None
        try:
            text = self._apply(marked[: last + 1], {**options, GENERATION_PROMPT: False})
        except TEMPLATE_ERRORS:
            return False
        return number not in marks.missing(text)


def _check_names(options: Mapping[str, Any]) -> None:
    refused = sorted(NOT_FOR_CLIENTS & options.keys())
    if refused:
        raise WrongField(f"{OPTIONS} cannot set {', '.join(refused)}; leave that out", OPTIONS)
    if options.get(GENERATION_PROMPT, True) is not True:
        raise WrongField(
            f"{OPTIONS} cannot set {GENERATION_PROMPT} to {options[GENERATION_PROMPT]!r}: an "
            "answer is a message of its own; leave it out, or use /completions with a prompt of your own",
            OPTIONS,
        )


@functools.lru_cache(maxsize=8)
def _variables(environment: Any, source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads. Raises TemplateError."""
    return frozenset(meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys())


def _not_rendered(place: ValuePlace) -> NotRendered:
    leaves_out = f"the model's chat template leaves out {place.path}"
    if place.message is None:
        return NotRendered(f"{leaves_out}; describe the tools in a message instead")
    if place.call is not None:
        leaves_out = f"the model's chat template leaves out {place.path.partition('.')[0]}"
    if place.path != "content":
        return NotRendered(
            f"message {place.message}: {leaves_out}; leave it out, or write what the model should read of it "
            "into the content"
        )
    remedy = (
        "beside tool_calls; send it as a message of its own before them"
        if place.has_calls
        else f"of messages with the role {place.role!r}; use a role that the template knows"
    )
    return NotRendered(f"message {place.message}: {leaves_out} {remedy}")


def _concat(pieces: Iterable[str]) -> str:
    """Join the pieces of a template's output, as jinja2 does, within the limits."""
    limits = _limits.get()
    if limits is None:
        return "".join(pieces)
    texts: list[str] = []
    length = 0
    for piece in pieces:
        texts.append(piece)
        length += len(piece)
        if length > limits.characters or time.monotonic() > limits.end:
            raise InvalidRequest(
                "the model's chat template makes this conversation too long: more than "
                f"{limits.characters} characters, or {limits.seconds:g} s of work; shorten it"
            )
    return "".join(texts)
