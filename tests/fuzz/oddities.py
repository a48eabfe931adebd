"""Values that fit their place and are odd: edges of types, and what databases and parsers stumble over."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

INTEGERS = (
    *(0, 1, 2, -1, -2, 65, 1000, 4096, 2**20, 10**7),
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**53, 2**53 + 1),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30, -(10**30), 10**400),
)
FLOATS = (
    *(0.0, -0.0, 0.5, 1.0, -1.0, 5e-324, 1e-45, 1e-38, 3.4e38, 3.5e38, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), 2.0**53, 2.0**63, -(2.0**63), 1e30, 253402300800.0),
)
TEXTS = (
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\ud800",
        "a\udfff",
        "\N{GRINNING FACE}" * 3,
        "e\u0301",
        "\u202e",
        "\n",
        "\x1b[2J",
    ),
    *(
        "x" * 250,
        "x" * 1001,
        "x" * 70_000,
        "9" * 5000,
        "-1",
        "1e999",
        "nan",
        "null",
        "None",
        "%00",
        "%s",
        "' --",
    ),
    *(".", "..", "../..", "a/b", "/etc/passwd", "tinker://", "tinker://a/weights/b", "http://127.0.0.1:1/"),
    *(
        "0001-01-01T00:00:00Z",
        "9999-12-31T23:59:59Z",
        "9999-12-31",
        "253402300800",
        "1970-01-01T00:00:00+23:59",
    ),
    *("age1", "ssh-rsa AAAAB3NzaC1yc2EAAAAAAAAAAQA=", "ssh-rsa AAAA", "ssh-ed25519 AAAA", "loss-", "float32"),
)
KEPT = ("session_id", "model_id", "sampling_session_id", "type", "base_model")  # mostly: else all is a 404
MOST_BYTES = 1 << 20  # of one body


@dataclass(frozen=True)
class Oddities:
    """Draws from these, and spoils what is in order."""

    random: Random

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def integer(self) -> int:
        return self.random.choice(INTEGERS)

    def text(self) -> str:
        text = self.random.choice(TEXTS)
        return text + self.random.choice(TEXTS) if self.chance(0.1) else text

    def number(self) -> float:
        return self.random.choice(FLOATS)

    def tokens(self, most: int = 12) -> list[int]:
        return [self.random.randrange(90) for _ in range(self.random.randint(1, most))]

    def spoilt(self, body: dict[str, Any]) -> dict[str, Any]:
        """A copy in which one to three places have another value, mostly of the same type."""
        body = json.loads(json.dumps(body))
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            self._spoil(body)
        return body

    def _spoil(self, tree: dict[str, Any] | list[Any]) -> None:
        """Walk down at random, and change something on the way."""
        while True:
            place = self._place(tree)
            if place is None:
                return
            value = tree[place]  # pyright: ignore[reportCallIssue, reportArgumentType]
            if isinstance(value, dict | list) and value and self.chance(0.75):
                tree = value
                continue
            tree[place] = self._instead_of(value)  # pyright: ignore[reportCallIssue, reportArgumentType]
            return

    def _place(self, tree: dict[str, Any] | list[Any]) -> str | int | None:
        if isinstance(tree, list):
            return self.random.randrange(len(tree)) if tree else None
        places = [key for key in tree if key not in KEPT or self.chance(0.05)]
        return self.random.choice(places) if places else None

    def _instead_of(self, value: Any) -> Any:
        if self.chance(0.06):
            return self.random.choice([None, True, {}, [], "text", 7, 0.5, [[]], {"": None}])
        match value:
            case bool():
                return not value
            case int():
                return self.integer() if self.chance(0.9) else self.number()
            case float():
                return self.number() if self.chance(0.8) else self.integer()
            case str():
                return self.text()
            case list():
                return self._list_instead_of(value)
            case dict():
                return {**value, self.text(): self.integer()}
        return self.random.choice([self.integer(), self.number(), self.text()])

    def _list_instead_of(self, value: list[Any]) -> list[Any]:
        first = value[0] if value else 0
        odd = self._instead_of(first) if not isinstance(first, dict | list) else first
        few, many = [odd] * 65, [first] * self.random.choice([200, 5000])
        if len(json.dumps(first)) * len(many) > MOST_BYTES:
            many = few
        return self.random.choice(
            [[], [odd], [0, odd], [odd, 0], [odd, odd], [*value, odd], value + value, value[:-1], few, many]
        )


class Plain(Oddities):
    """Leaves in order what is in order."""

    def spoilt(self, body: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(body))


def as_json(body: object, random: Random) -> bytes:
    """JSON as it is sent; now and then with a key twice, which is allowed and means nothing."""
    text = json.dumps(body)
    if isinstance(body, dict) and body and random.random() < 0.02:
        key = random.choice(list(body))
        text = f"{{{json.dumps(key)}: {random.choice(INTEGERS)}, {text[1:]}"
    return text.encode()
