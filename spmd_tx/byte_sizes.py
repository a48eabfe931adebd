"""Numbers of bytes as people write them: 500MB, 1.5 GiB, or a share as 5%."""

import re

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for kind, base in (("B", 1000), ("iB", 1024))
}


def parse_size(text: str, whole: int) -> int:
    """The bytes that ``text`` means; a share is one of ``whole``. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", text)
    if match is not None:
        number, unit = float(match[1]), match[2]
        if unit == "%" and number <= 100:
            return int(whole * number / 100)
        if unit in UNITS:
            return int(number * UNITS[unit])
    raise ValueError(f"{text!r} is no size; write it as 500MB, 1.5GiB or 5%")


def show_size(size: float) -> str:
    """Short, for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
