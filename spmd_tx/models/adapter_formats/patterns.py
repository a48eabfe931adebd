r"""Matches regular expressions of clients with names of modules, in a time that no expression can blow up.

Python's own matcher may need time exponential in a name's length. This one keeps the set of places that a
match can have reached. It reads what adapter_config.json has in practice: characters, ``.``, classes, groups,
alternatives, repetitions, ``^``, ``$``, ``\d``, ``\w``, ``\s`` and ``\b``.
"""

import re
from collections.abc import Callable

from spmd_tx.errors import InvalidRequest

MOST_CHARACTERS, MOST_REPEATS, MOST_DEPTH = 2000, 50, 8
SHOWN = 200  # characters of an expression
SPECIAL = "dDwWsS"
QUANTIFIER = re.compile(r"(?:[*+?]|\{(?P<least>\d{1,4})(?P<many>,(?P<most>\d{0,4}))?\})\??")
ENDLESS = 1 << 30

MatchPositions = frozenset[int]
Matcher = Callable[
    [str, MatchPositions], MatchPositions
]  # a name, and where a match has come to: where it can be after this


class Pattern:
    """Holds one expression."""

    def __init__(self, expression: str) -> None:
        """Raise InvalidRequest for an expression that is not read."""
        self._reader = _Reader(expression)
        self._matcher = self._reader.whole()

    def matches(self, name: str) -> bool:
        """Whether it matches the whole name."""
        return len(name) in self._matcher(name, frozenset({0}))

    def matches_end(self, name: str) -> bool:
        """Whether it matches the name from its beginning, or from behind a dot, to its end."""
        starts = {0, *(place + 1 for place, character in enumerate(name) if character == ".")}
        return len(name) in self._matcher(name, frozenset(starts))


class _Reader:
    """Reads an expression from left to right."""

    def __init__(self, expression: str) -> None:
        self._text, self._at, self._depth = expression, 0, 0

    def whole(self) -> Matcher:
        if len(self._text) > MOST_CHARACTERS:
            raise self._not_read(f"it has more than {MOST_CHARACTERS} characters")
        matcher = self._alternatives()
        if self._at < len(self._text):
            raise self._not_read("a parenthesis closes nothing")
        return matcher

    def _not_read(self, reason: str) -> InvalidRequest:
        return InvalidRequest(
            f"the pattern {self._text[:SHOWN]!r} is not read: {reason}; name modules, or use characters, "
            "classes, groups, alternatives and repetitions alone"
        )

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise self._not_read("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, character: str) -> bool:
        is_there = self._text.startswith(character, self._at)
        self._at += len(character) * is_there
        return is_there

    def _alternatives(self) -> Matcher:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise self._not_read(f"its groups are more than {MOST_DEPTH} deep")
        alternatives = [self._sequence()]
        while self._take("|"):
            alternatives.append(self._sequence())
        self._depth -= 1
        return lambda name, places: frozenset().union(*(each(name, places) for each in alternatives))

    def _sequence(self) -> Matcher:
        matchers: list[Matcher] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            matchers.append(self._repeated(self._item()))

        def match(name: str, places: MatchPositions) -> MatchPositions:
            for each in matchers:
                places = each(name, places)
            return places

        return match

    def _repeated(self, item: Matcher) -> Matcher:
        quantifier = QUANTIFIER.match(self._text, self._at)
        if quantifier is None:
            return item
        self._at = quantifier.end()
        sign = quantifier[0][0]
        least = int(quantifier["least"]) if sign == "{" else int(sign == "+")
        most = 1 if sign == "?" else ENDLESS
        if sign == "{":
            most = int(quantifier["most"] or ENDLESS) if quantifier["many"] else least
        if not least <= most or least > MOST_REPEATS or MOST_REPEATS < most < ENDLESS:
            raise self._not_read(f"{quantifier[0]} is no repetition of at most {MOST_REPEATS} times")
        if QUANTIFIER.match(self._text, self._at):
            raise self._not_read("it repeats a repetition")

        def match(name: str, places: MatchPositions) -> MatchPositions:
            for _ in range(least):
                before, places = places, item(name, places)
                if places == before:
                    break
            reached, newest, count = places, places, least
            while newest and count < most:
                newest = item(name, newest) - reached
                reached, count = reached | newest, count + 1
            return reached

        return match

    def _item(self) -> Matcher:
        character = self._next()
        if character == "(":
            if self._take("?") and not self._take(":"):
                raise self._not_read("groups that begin with (? are not, but for (?:")
            group = self._alternatives()
            if not self._take(")"):
                raise self._not_read("a parenthesis is not closed")
            return group
        if character in "^$":
            return _assertion(lambda name, place: place == (0 if character == "^" else len(name)))
        if character == "\\" and self._text[self._at : self._at + 1] in ("b", "B"):
            is_wanted = self._next() == "b"
            return _assertion(lambda name, place: _is_boundary(name, place) == is_wanted)
        if character in "*+?{":
            raise self._not_read(f"{character} repeats nothing")
        return _one(self._test(character))

    def _test(self, character: str) -> Callable[[str], bool]:
        if character == ".":
            return lambda other: other != "\n"
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escaped()
        return lambda other: other == character

    def _escaped(self) -> Callable[[str], bool]:
        character = self._next()
        if character in SPECIAL:
            test = re.compile(rf"\{character}").fullmatch
            return lambda other: test(other) is not None
        if character.isalnum():
            raise self._not_read(f"\\{character} is not")
        return lambda other: other == character

    def _class(self) -> Callable[[str], bool]:
        is_negated, tests = self._take("^"), list[Callable[[str], bool]]()
        while not tests or not self._take("]"):
            first = self._next()
            if first == "\\":
                tests.append(self._escaped())
            elif (
                self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]"
            ):
                self._at += 1
                last = self._next()
                if last == "\\" or last < first:
                    raise self._not_read(f"{first}-{last} is no range")
                tests.append(lambda other, first=first, last=last: first <= other <= last)
            else:
                tests.append(lambda other, first=first: other == first)
        return lambda other: any(test(other) for test in tests) != is_negated


def _one(test: Callable[[str], bool]) -> Matcher:
    return lambda name, places: frozenset(
        place + 1 for place in places if place < len(name) and test(name[place])
    )


def _assertion(holds: Callable[[str, int], bool]) -> Matcher:
    return lambda name, places: frozenset(place for place in places if holds(name, place))


def _is_boundary(name: str, place: int) -> bool:
    before, after = name[max(0, place - 1) : place], name[place : place + 1]
    return (re.fullmatch(r"\w", before) is None) != (re.fullmatch(r"\w", after) is None)
