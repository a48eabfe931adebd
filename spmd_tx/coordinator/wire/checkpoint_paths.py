"""tinker:// paths, the names of checkpoints on the wire."""

import re
import unicodedata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from spmd_tx.errors import InvalidRequest

WEIGHTS = "weights"  # weights and optimizer state, to train on
SAMPLER_WEIGHTS = "sampler_weights"  # a PEFT folder, to sample from
EXTERNAL_WEIGHTS = "external_weights"  # a PEFT folder, to be downloaded, or uploaded by a client
KINDS = (WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS)

MAX_NAME_BYTES = 200  # file systems take 255
MOST_SHOWN = 500  # characters of a text that is no path

# The SDK puts names into URLs as they are, where # ? % / and \ mean something else; Orbax puts folders into
# patterns, where * ? [ and ] do. U+FFFD is what bytes that are no text are read as.
MISREAD = frozenset("#?%/\\*[]\N{REPLACEMENT CHARACTER}")
NAMES = (
    "a name holds letters, digits, spaces and other printable characters, as - _ . = + ( ), but none of "
    "/ \\ # ? % * [ ], and has no dot or space at its beginning or end"
)


class CheckpointPath(NamedTuple):
    """tinker://RUN/KIND/NAME"""

    run_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    def folder(self, checkpoints_dir: Path) -> Path:
        return checkpoints_dir / self.run_folder / self.kind / self.name

    @property
    def run_folder(self) -> str:
        """The name of the folder in which stores keep the checkpoints of the run."""
        return self.run_id.replace(":", "_")


def parse(text: str) -> CheckpointPath:
    """Read a tinker:// path. Raises InvalidRequest when the text is not one."""
    scheme, _, rest = text.partition("://")
    parts = rest.split("/")
    if scheme != "tinker" or len(parts) != 3 or parts[1] not in KINDS:
        raise InvalidRequest(
            f"{text[:MOST_SHOWN]!r} is not a checkpoint path; it must look like tinker://RUN/weights/NAME, "
            "tinker://RUN/sampler_weights/NAME or tinker://RUN/external_weights/NAME"
        )
    check_name("a training run", parts[0])
    check_name("a checkpoint", parts[2])
    return CheckpointPath(*parts)


def parse_to_sample(text: str) -> CheckpointPath:
    """Read the path of a checkpoint that can be sampled. Raises InvalidRequest for any other text."""
    path = parse(text)
    if path.kind not in (SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS):
        raise InvalidRequest(
            f"{path} cannot be sampled; sample from one saved with save_weights_for_sampler or "
            "save_weights_external"
        )
    return path


def parse_to_train(text: str, *, optimizer: bool) -> CheckpointPath:
    """Read the path of a checkpoint that can be trained. Raises InvalidRequest for any other text."""
    path = parse(text)
    if path.kind not in (WEIGHTS, EXTERNAL_WEIGHTS):
        raise InvalidRequest(
            f"checkpoint {path} cannot be trained; use one that save_state has saved (tinker://RUN/{WEIGHTS}/"
            f"NAME), or one of tinker://RUN/{EXTERNAL_WEIGHTS}/NAME"
        )
    if optimizer and path.kind == EXTERNAL_WEIGHTS:
        raise InvalidRequest(
            f"checkpoint {path} has no optimizer state; load its weights alone, as "
            "create_training_client_from_state does"
        )
    return path


def check_new_name(name: str) -> None:
    """Raise InvalidRequest unless a new checkpoint may have this name: every client can address it by it."""
    _check_length("a checkpoint", name)
    is_trimmed = name == name.strip(" .")
    if not (name and is_trimmed and name.isprintable() and MISREAD.isdisjoint(name)):
        raise InvalidRequest(f"{name!r} cannot be the name of a checkpoint; {NAMES}")
    if not unicodedata.is_normalized("NFC", name):
        raise InvalidRequest(
            f"{name!a} cannot be the name of a checkpoint: it has letters and their accents apart, and looks "
            f"like {unicodedata.normalize('NFC', name)!a}; send that (Unicode's form NFC)"
        )


def check_name(of_what: str, name: str) -> None:
    """Raise InvalidRequest for a name that cannot be the name of one folder.

    Earlier versions took names that ``check_new_name`` refuses.
    """
    _check_length(of_what, name)
    is_usable = name and not name.startswith(".") and name.isprintable() and not {"/", "\\"} & set(name)
    if not is_usable:
        raise InvalidRequest(f"{name!r} cannot be the name of {of_what}; {NAMES}")


def _check_length(of_what: str, name: str) -> None:
    size = len(name.encode(errors="surrogatepass"))
    if size > MAX_NAME_BYTES:
        raise InvalidRequest(
            f"the name {name[:20]!r}... of {of_what} has {size} bytes; use at most {MAX_NAME_BYTES}"
        )


def as_read_in_a_url(name: str) -> str:
    """The name that a server reads in a URL into which a client has put ``name`` without quoting it."""
    return unquote(re.split("[?#]", name)[0])


def quoted(path: CheckpointPath) -> str:
    """The path as the SDK must be given it to address a checkpoint whose name a URL reads otherwise."""
    return str(path._replace(name=quote(path.name, safe="")))
