"""Texts that quote what clients have sent, made fit for databases and JSON. Pure."""

MOST_CHARACTERS = 10_000


def storable(text: str) -> str:
    """The text as every database takes it: without NUL and halves of characters, and not for ever long."""
    cut = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."
    return cut.replace("\0", "\ufffd").encode(errors="replace").decode()
