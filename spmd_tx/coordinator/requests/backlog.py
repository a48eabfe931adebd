"""Counts the queued sample requests of each session, and the tokens that they take at most, with scores."""

from collections import Counter

from spmd_tx.coordinator.requests.records import Request
from spmd_tx.coordinator.wire.sampling import SampleRequest

SCORES_PER_TOKEN = 4


class Backlog:
    """Counts sample requests without an outcome. The tokens of an earlier run's requests are not known."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by session; without zeros
        self.tokens: Counter[str] = Counter()
        self.total_tokens = 0
        self._tokens_of: dict[str, int] = {}  # by request

    def add(self, request: Request, tokens: int = 0) -> None:
        self.requests[request.session_id] += 1
        if tokens:
            self._tokens_of[request.id] = tokens
            self._count(request.session_id, tokens)

    def tokens_of(self, request_id: str) -> int:
        """Return the tokens that a request takes at most; 0: they are not known."""
        return self._tokens_of.get(request_id, 0)

    def remove(self, request: Request) -> None:
        self.requests[request.session_id] -= 1
        if not self.requests[request.session_id]:
            del self.requests[request.session_id]
        self._count(request.session_id, -self._tokens_of.pop(request.id, 0))

    def _count(self, session_id: str, tokens: int) -> None:
        self.total_tokens += tokens
        self.tokens[session_id] += tokens
        if not self.tokens[session_id]:
            del self.tokens[session_id]


def most_tokens(request: SampleRequest, max_context: int) -> int:
    """Return the tokens that a valid request takes at most: its prompt, once, and those of all samples.

    Scores of other tokens count a quarter each: a token takes some 40 bytes of memory, a score 8.
    """
    prompt, drawn = _lengths(request, max_context)
    targets = request.target_prompt_logprobs
    of_prompt = (request.topk_prompt_logprobs or 0) + (request.prompt_alt_tokens_k or 0)
    scores = prompt * of_prompt + (0 if targets is None else len(targets.data))
    return prompt + drawn + (scores + most_cells(request, max_context)) // SCORES_PER_TOKEN


def most_cells(request: SampleRequest, max_context: int) -> int:
    """Return how many likeliest tokens a valid request gets at most in the places of those that it draws."""
    return _lengths(request, max_context)[1] * (request.topk_sample_logprobs or 0)


def _lengths(request: SampleRequest, max_context: int) -> tuple[int, int]:
    """Return the tokens of the prompt, and the most tokens of all samples."""
    prompt = request.prompt.length
    left = max(1, max_context - prompt)
    each = left if request.sampling_params.max_tokens is None else request.sampling_params.max_tokens
    return prompt, request.num_samples * min(each, left)
