"""The requests without an outcome, by session and by model. They outlive the workers."""

from collections.abc import Iterable, Iterator

from spmd_tx.coordinator.requests.records import Request


class Unfinished:
    """Holds requests in the order of their acceptance."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests: dict[str, Request] = {}
        self._by_session: dict[str, set[str]] = {}
        self._by_line: dict[str, dict[str, Request]] = {}
        for request in requests:
            self.add(request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __bool__(self) -> bool:
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._by_session.setdefault(request.session_id, set()).add(request.id)
        self._by_line.setdefault(request.line, {})[request.id] = request

    def remove(self, request: Request) -> None:
        del self._requests[request.id]
        siblings = self._by_session[request.session_id]
        siblings.discard(request.id)
        if not siblings:
            del self._by_session[request.session_id]
        line = self._by_line[request.line]
        del line[request.id]
        if not line:
            del self._by_line[request.line]

    def has_session(self, session_id: str) -> bool:
        """Whether a session has work left."""
        return session_id in self._by_session

    def of_line(self, line: str) -> list[Request]:
        return list(self._by_line.get(line, {}).values())
