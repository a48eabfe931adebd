"""How much a request has used, as counted for bills. Pure."""

from typing import NamedTuple


class Usage(NamedTuple):
    """Counts what a request has used, once, when its result is stored: a replay adds nothing."""

    trained: int = 0  # tokens through forward_backward
    forwarded: int = 0  # tokens through forward
    prompt: int = 0  # tokens; the samples of one request share its prompt
    cached: int = 0  # tokens of the prompt that were found in the prefix cache
    sampled: int = 0  # tokens
    checkpoints: int = 0  # saved under a name
    images: int = 0  # different ones of a request, counted when it is accepted

    @property
    def tokens(self) -> int:
        return self.trained + self.forwarded + self.prompt + self.sampled


NO_USAGE = Usage()
