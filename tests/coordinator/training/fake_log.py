"""A stand-in for the write-ahead log: payloads and outcomes in memory."""

import asyncio
from collections import Counter, defaultdict

from spmd_tx.coordinator.requests.records import Executed, Failed, Finished, LossCount, ModelHistory, Request


class FakeLog:
    """Payloads and outcomes in memory."""

    def __init__(self, announce):
        self._announce = announce
        self.payloads = {}
        self.outcomes = {}
        self.order = []  # of outcomes
        self.requests = {}
        self.resignations = {}  # of the operator: why, by id
        self.losses = Counter()
        self.losses_by_command = Counter()
        self._settled = defaultdict(asyncio.Event)

    def submit(self, kind, line, seq_id, payload):
        number = len(self.payloads)
        request = Request(number, f"request-{number}", kind, line, seq_id, line.split(":")[0])
        self.payloads[request.id] = payload
        self.requests[request.id] = request
        self._announce(request)
        return request.id

    def unfinished(self):
        return [request for id, request in self.requests.items() if id not in self.outcomes]

    def note(self, stage, request_ids):
        pass

    def worked(self, request_ids, seconds):
        pass

    async def stored(self, request_ids):
        for request_id in request_ids or ():
            await self.outcome(request_id)

    async def history(self, line, after):
        executed, closed = [], set()
        mine = [request for request in self.requests.values() if request.line == line]
        for request in sorted(mine, key=lambda request: request.seq_id):
            outcome = self.outcomes.get(request.id)
            if outcome is None or request.seq_id <= after:
                continue
            if isinstance(outcome, Finished) or outcome.executed:
                layout = getattr(outcome, "layout", None)
                executed.append(Executed(request, outcome.digest, layout))
            else:
                closed.add(request.seq_id)
        creation = next((self.outcomes.get(each.id) for each in mine if each.seq_id == 0), None)
        refusal = creation.error if isinstance(creation, Failed) else None
        return ModelHistory(executed, closed, refusal, creation is not None)

    async def count_losses(self, in_flight, blamed):
        self.losses.update(in_flight)
        self.losses_by_command.update(blamed)
        return {id: LossCount(self.losses[id], self.losses_by_command[id]) for id in in_flight}

    async def given_up(self):
        return {id: why for id, why in self.resignations.items() if id not in self.outcomes}

    async def payload(self, request):
        payload = self.payloads[request.id]
        if isinstance(payload, Exception):
            raise payload
        return payload

    def resolve(self, request_id, outcome):
        self.outcomes.setdefault(request_id, outcome)
        self.order.append(request_id)
        self._settled[request_id].set()

    async def outcome(self, request_id):
        await self._settled[request_id].wait()
        return self.outcomes[request_id]
