"""Reads and writes numbers of bytes as people do: 500MB, 1.5 GiB, or a share such as 5%."""

import re

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for kind, base in (("B", 1000), ("iB", 1024))
}


def parse_size(text: str, whole: int) -> int:
    """Return the number of bytes; a percentage is one of ``whole``. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", text)
    if match is not None:
        number, unit = float(match[1]), match[2]
        if unit == "%" and number <= 100:
            return int(whole * number / 100)
        if unit in UNITS:
            return int(number * UNITS[unit])
    raise ValueError(f"{text!r} is not a size; write it as 500MB, 1.5GiB or 5%")


def show_size(size: float) -> str:
    """Format a size for people, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
