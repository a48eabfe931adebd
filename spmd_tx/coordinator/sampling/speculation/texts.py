"""Finds what is likely to follow a text in other answers to its prompt, in itself and in the prompt. Pure.

A text is only looked up among those of its own session and prompt: what others have sampled decides nothing,
not even how long it takes.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

from spmd_tx.coordinator.sampling.speculation.guess import TRAINED, Record

CONTEXT = 3  # tokens that must be alike before the place of a draft
MOST_SKIPPED = 12  # last tokens that others may have in the place of these, before a text goes on alike
MOST_COMPARED = 32  # tokens before two places, to find the one that is most alike
MOST_PLACES = 8  # that are compared
MOST_OF_PROMPT = 4096  # last tokens of a prompt that drafts may come from
MOST_TOKENS = 2**18  # of all texts; each takes some 200 bytes
MOST_PER_PROMPT = MOST_TOKENS // 4

MOST_PROMPTS = 1024

Owner = tuple[str, int]  # of a text: a request, and the number of its sample
PROMPT: Owner = "", 0
_Place = tuple[int, int]  # number of a text, and of a token in it


class SessionRecords:
    """Says what came of the drafts in one session."""

    def __init__(self) -> None:
        self.of_texts, self.of_model = Record(), Record(acceptance=TRAINED)


class DraftTexts:
    """Holds the answers to one prompt in one session, and the prompt."""

    def __init__(self, prompt: Sequence[int], session: SessionRecords) -> None:
        self._beginning = list(prompt[-CONTEXT:])  # of every answer, so that its first tokens are found
        self._texts: list[list[int]] = []
        self._older: list[list[_Place | None]] = []  # of each token: where else what is before it was
        self._numbers: dict[Owner, int] = {}
        self._newest: dict[tuple[int, ...], _Place] = {}  # what follows so many tokens
        self._whole: dict[Owner, Sequence[int]] = {}  # answers that are not read yet
        self.session = session
        self.record = Record(session.of_texts)  # of what came of drafts from these texts
        self._lengths: dict[Owner, int] = {}
        self.size = 0  # tokens of all texts
        self.put(PROMPT, prompt[-MOST_OF_PROMPT:])

    def put(self, owner: Owner, tokens: Sequence[int]) -> None:
        """Note an answer as far as it is known, to be read when somebody looks for drafts."""
        self._whole[owner] = tokens
        self.size += len(tokens) - self._lengths.get(owner, 0)
        self._lengths[owner] = len(tokens)

    def read(self) -> None:
        """Read all that has been put since."""
        for owner, tokens in self._whole.items():
            beginning = [] if owner == PROMPT else self._beginning
            if owner not in self._numbers:
                self._numbers[owner] = len(self._texts)
                self._texts.append([])
                self._older.append([])
                self._extend(self._numbers[owner], beginning)
            number = self._numbers[owner]
            self._extend(number, tokens[len(self._texts[number]) - len(beginning) :])
        self._whole.clear()

    def find(self, content: Sequence[int], most: int) -> list[int]:
        """Return what is likely to follow the last tokens of a text, up to ``most`` tokens.

        Where none of the texts has the last tokens, some of these may stand in the place of others.
        """
        for skipped in range(MOST_SKIPPED + 1):
            drafts = self._behind(content[: len(content) - skipped], most, skipped)
            if drafts:
                return drafts
        return []

    def _behind(self, content: Sequence[int], most: int, skipped: int) -> list[int]:
        """Return what is ``skipped`` tokens behind the place that is most like the end of ``content``."""
        place = self._newest.get(tuple(content[-CONTEXT:]))
        best, best_rank = list[int](), (0, 0)
        for _ in range(MOST_PLACES):
            if place is None:
                break
            number, start = place
            text = self._texts[number]
            drafts = text[start + skipped : start + skipped + most]
            rank = _alike(text, start, content), len(drafts)
            if drafts and rank > best_rank:
                best, best_rank = drafts, rank
            place = self._older[number][start]
        return best

    def _extend(self, number: int, tokens: Sequence[int]) -> None:
        text, older = self._texts[number], self._older[number]
        for token in tokens:
            place = len(text)
            context = tuple(text[-CONTEXT:])
            older.append(self._newest.get(context) if place >= CONTEXT else None)
            if place >= CONTEXT:
                self._newest[context] = number, place
            text.append(token)


class SessionTexts:
    """Holds the texts of all sessions and prompts, at most MOST_TOKENS: those used last."""

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[str, tuple[int, ...]], DraftTexts] = {}  # least recently used first
        # They live as long as one of the session's prompts.
        self._records = WeakValueDictionary[str, SessionRecords]()

    @property
    def size(self) -> int:
        """Tokens of all texts."""
        return sum(texts.size for texts in self._by_prompt.values())

    def of(self, session: str, prompt: Sequence[int]) -> DraftTexts:
        """Return the texts of a prompt in a session, which are none at first."""
        key = session, tuple(prompt)
        texts = self._by_prompt.pop(key, None)
        if texts is None or texts.size > MOST_PER_PROMPT:
            texts = DraftTexts(prompt, self._records.setdefault(session, SessionRecords()))
        self._by_prompt[key] = texts
        while len(self._by_prompt) > MOST_PROMPTS or (self.size > MOST_TOKENS and len(self._by_prompt) > 1):
            self._by_prompt.pop(next(iter(self._by_prompt)))
        return texts


def _alike(text: list[int], end: int, content: Sequence[int]) -> int:
    """Return how many tokens before ``end`` are those at the end of ``content``."""
    most = min(end, len(content), MOST_COMPARED)
    return next((n for n in range(most) if text[end - 1 - n] != content[-1 - n]), most)
