"""What requests have used, as it is counted for bills. Pure."""

from typing import NamedTuple


class Usage(NamedTuple):
    """What a request was worth. Counted once, when its result is stored: a replay adds nothing."""

    trained: int = 0  # tokens through forward_backward
    forwarded: int = 0  # tokens through forward
    prompt: int = 0  # tokens; the samples of one request share its prompt
    cached: int = 0  # of the prompt's, those that were found in the cache
    sampled: int = 0  # tokens
    checkpoints: int = 0  # saved under a name

    @property
    def tokens(self) -> int:
        return self.trained + self.forwarded + self.prompt + self.sampled


NOTHING = Usage()
