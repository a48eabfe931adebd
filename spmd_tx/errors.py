"""All errors that the service raises on purpose, as one tree.

SpmdTxError
├── RequestError          the caller can fix it; found by the coordinator before anything is broadcast
│   ├── InvalidRequest    400
│   │   ├── LossGivenUp   a custom loss takes too long, and would take as long again
│   │   ├── NotRendered   a chat template leaves out a part of a conversation
│   │   ├── PromptTooLong a prompt leaves no room for an answer
│   │   └── WrongField    a field of a call to the API of others is unknown, or not offered
│   ├── Unauthorized      401
│   ├── Forbidden         403
│   ├── NotFound          404
│   │   └── UnknownResponse   an answer to which a conversation refers is not stored
│   ├── BodyTooSlow       408
│   ├── BodyTooLarge      413
│   ├── UnsupportedBody   415
│   └── TooManyRequests   429
├── StartError            the operator can fix it: the message names the option or file, and the remedy
│   ├── DoesNotFit        the model, its adapters and its steps need more memory than a device has
│   ├── UnreadableModel   the files of a base model cannot be found or read now
│   ├── DatabaseDamaged   also ends a server that runs
│   └── DatabaseTaken     by another server; also ends one that runs
├── UnusableWeights       a folder's weights are not loaded; refused by all workers alike
│   ├── ForeignWeights    they are of another base model
│   └── DamagedWeights    they are not what was written
├── DamagedBody           a payload or result is not what was written
├── NotSent               a command of a request had no effect, and the request does not count
│   ├── CompileFailed     its program cannot be compiled
│   ├── NotLoaded         the workers refused the folder that it names, or whose weights it needs
│   └── NotPlanned        the server failed when it made the command
├── Abandoned             500: a request could not be stored, or not carried out after it was accepted
│   └── ForeignCodeFailed a library that ran in a child process for it crashed, or exceeded its limits
├── Unavailable           503: the service cannot take the request now
├── CrashLoop             the workers crash again and again: the server gives up, with a diagnosis
└── MeshError             the worker processes may disagree about state; the generation must end
    ├── CommandGap        a command was lost on its way to a worker
    ├── ServerFault       the coordinator failed in work that it does for several requests at once
    └── WorkerLost        a worker process died, hung or reported an exception
"""

from collections.abc import Callable
from functools import cached_property
from typing import ClassVar, Literal

import msgspec

# What msgspec raises for bytes that are not what they should be: the latter for strings that are no UTF-8.
UNREADABLE = msgspec.DecodeError, UnicodeDecodeError


class SpmdTxError(Exception):
    """Base of all errors that are raised on purpose."""


class RequestError(SpmdTxError):
    """The request is at fault, and its sender can fix it."""

    status: ClassVar[int] = 400


class InvalidRequest(RequestError):
    """The request is well-formed but cannot be carried out."""


class LossGivenUp(InvalidRequest):
    """A custom loss takes too long, and would take as long again."""


class NotRendered(InvalidRequest):
    """A chat template leaves out a part of a conversation, so the model would not see it."""


class PromptTooLong(InvalidRequest):
    """A prompt leaves no room for an answer in the context."""

    @classmethod
    def by(cls, tokens: int, max_context: int, size: str | None = None) -> "PromptTooLong":
        """Say it in the words, and with the numbers, by which agents know that they must shorten it.

        ``size`` says what it has, if the tokens were not counted.
        """
        return cls(
            f"prompt is too long: {tokens} tokens > {max_context - 1} maximum (context_length_exceeded): it "
            f"has {size or f'{tokens} tokens'} and the context holds {max_context}, one of them to be drawn; "
            "shorten it"
        )


class WrongField(InvalidRequest):
    """A field of a call to OpenAI's or Anthropic's API is unknown, or asks for what is not offered."""

    def __init__(self, message: str, param: str | None = None, code: str = "unsupported_value") -> None:
        super().__init__(message)
        self.param = param  # None: only the message names it
        self.code = code  # one of OpenAI's


class Unauthorized(RequestError):
    """The API key is missing, unknown, or not valid any more."""

    status = 401


class Forbidden(RequestError):
    """The API key is valid, but does not allow this."""

    status = 403


class NotFound(RequestError):
    """No such session, model, sampler, checkpoint or future."""

    status = 404


class UnknownResponse(NotFound):
    """An answer to which a conversation refers is not stored."""


class BodyTooSlow(RequestError):
    """The client stopped sending in the middle of its request."""

    status = 408


class BodyTooLarge(RequestError):
    """The body is longer than its bound."""

    status = 413


class UnsupportedBody(RequestError):
    """The body has a content type that is not accepted."""

    status = 415


class TooManyRequests(RequestError):
    """The caller asks for too much at a time; the same request may succeed after ``seconds``."""

    status = 429

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class StartError(SpmdTxError):
    """The server cannot start as configured. Printed without a traceback; exit code 2."""


class DoesNotFit(StartError):
    """What is asked for needs more memory than a device has."""

    def __init__(
        self, message: str, briefly: str, needed: int, remedies: Callable[[], str] = lambda: ""
    ) -> None:
        super().__init__(message)
        self.briefly = briefly  # without the parts and the remedies
        self.needed = needed  # bytes of a device
        self._remedies = remedies

    @cached_property
    def _whole(self) -> str:
        """What would help takes seconds to find, and of most meshes that are tried nobody reads it."""
        return f"{self.args[0]}{self._remedies()}"

    def __str__(self) -> str:
        return self._whole


class UnreadableModel(StartError):
    """The files of a base model cannot be found or read now. Other groups of workers do without them."""


class DatabaseDamaged(StartError):
    """The database file is not what SQLite wrote; writing on would make it worse."""


class DatabaseTaken(StartError):
    """Another server uses the database."""


class UnusableWeights(SpmdTxError):
    """A folder does not have weights that can be used. Nothing of it was loaded.

    It depends on files alone that all workers see, so that all of them say so or none.
    """


class ForeignWeights(UnusableWeights):
    """A folder does not have the weights of this base model."""


class DamagedWeights(UnusableWeights):
    """A folder does not have what was written there."""


class DamagedBody(SpmdTxError):
    """A payload or result on disk is damaged; trying again does not help."""


class NotSent(SpmdTxError):
    """A command of a request was not sent, or refused; other requests are not affected."""


class CompileFailed(NotSent):
    """The request's program does not compile."""


class NotLoaded(NotSent):
    """The workers refused to load the folder of the request's weights, and changed nothing."""

    def __init__(self, message: str, *, is_damage: bool) -> None:
        super().__init__(message)
        self.is_damage = is_damage

    @property
    def fault(self) -> Literal["user", "server"]:
        """Whose it is."""
        return "server" if self.is_damage else "user"


class NotPlanned(NotSent):
    """The server failed unexpectedly when it made a command of the request."""


class Abandoned(SpmdTxError):
    """The server has given up a request; sending it again would not help."""


class ForeignCodeFailed(Abandoned):
    """A library failed in its child process, which has ended; nothing else is affected."""


class Unavailable(SpmdTxError):
    """The service is starting, draining or has lost its workers."""


class CrashLoop(SpmdTxError):
    """Starting the workers once more would not help. Unfinished requests stay in the log."""


class MeshError(SpmdTxError):
    """The worker processes may no longer agree on their state; the generation must end."""


class ServerFault(MeshError):
    """The coordinator failed unexpectedly in work that it does for several requests at once."""

    def __init__(self, message: str, has_suspects: bool) -> None:
        super().__init__(message)
        self.has_suspects = has_suspects  # whether the requests that it was working on are known


class CommandGap(MeshError):
    """A command was lost on its way to this worker."""


class WorkerLost(MeshError):
    """A worker process is gone."""

    def __init__(self, message: str, by_command: bool = False) -> None:
        super().__init__(message)
        self.by_command = by_command  # whether the current command may be the cause
