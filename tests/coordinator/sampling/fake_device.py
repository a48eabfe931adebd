"""Workers without JAX: a tiny "model" whose next token is a hash of everything that the row's pages hold.

A page that is shared wrongly, written too early, read too late or not copied changes the tokens.
"""

from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from spmd_tx.protocol.commands import (
    CHUNK_STEPS,
    REJECTED,
    Decode,
    Drop,
    Forward,
    ForwardBackward,
    Move,
    OptimStep,
    Prefill,
)
from spmd_tx.protocol.places import BankSlot, Idle, TrainSlot, WeightsFolder
from spmd_tx.protocol.reports import Reply

VOCABULARY = 97
BASE = "base"
NO_DRAFT = -1


def draw(version, content, seeds):
    """Return the next token after these, and its log-probability."""
    text = repr((version, list(content), [int(seed) for seed in seeds]))
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") % VOCABULARY, -float(digest[4]) / 64


def redraw_within(mask, token, version, content, seeds):
    """Return the token if the mask allows it, else another one that it does."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert len(allowed), "a mask without any token"
    if token in allowed:
        return token
    if allowed[0] < VOCABULARY:  # a served model may have more, and a grammar may allow only those
        allowed = allowed[allowed < VOCABULARY]
    return int(allowed[draw(version, content, [*seeds, 1])[0] % len(allowed)])


def score(version, content, target):
    """Return the log-probability of a prompt token after these."""
    digest = blake2b(repr((version, list(content), int(target))).encode(), digest_size=1).digest()
    return np.float32(-digest[0] / 32)


def continuation(version, prompt, seeds, count, stop_tokens=()):
    """Return the tokens and log-probabilities that one sample must have."""
    content, logprobs = list(prompt), []
    while len(content) - len(prompt) < count and (not logprobs or content[-1] not in stop_tokens):
        token, logprob = draw(version, content, seeds)
        content.append(token)
        logprobs.append(logprob)
    return content[len(prompt) :], logprobs


def is_follower(command, row):
    return command.depths is not None and command.depths[row] > 0


@dataclass
class Row:
    token: int = 0
    position: int = 0
    remaining: int = 0
    table: tuple = ()
    is_redrawn: bool = False
    expected: int = NO_DRAFT  # what the model expects next


class FakeDevice:
    """Executes commands as the protocol says, and fails on those that break it.

    If it is ``exact``, what it holds of a token includes which program wrote it, and at which place of a
    block: like a device on which every program rounds in its own way. If it ``expects`` tokens, it says of a
    position whether what the model expects there is right.
    """

    def __init__(self, shards, pages, page_size, exact=False, expects=None):
        self.page_size, self.expects = page_size, expects
        self.exact = exact
        self.states = [{0: (None, [])} for _ in range(shards)]  # by slot: (version, tokens read)
        self.origins = np.full((shards, pages, page_size), None, object)
        self.tokens = np.full((shards, pages, page_size), -1)
        self.versions = np.full((shards, pages, page_size), "", object)
        self.bank = {0: BASE}
        self.paged = {}  # by version
        self.rows = [[] for _ in range(shards)]
        self.executed = defaultdict(int)
        self.saves = 0  # of training slots into the bank

    def execute(self, command):
        """Return the arrays and metrics of the reply."""
        self.executed[type(command)] += 1
        match command:
            case Prefill():
                return self._prefill(command), {}
            case Decode():
                return self._decode(command), {}
            case Move():
                return {}, self._move(command)
            case Drop(places=places):
                for place in places:
                    del self.paged[place.name]
            case ForwardBackward(rows=rows) | Forward(rows=rows):
                return {name: np.zeros(rows.tokens.shape, np.float32) for name in ("logprobs", "losses")}, {}
            case OptimStep():
                return {}, {"grad_norm": 1.0, "applied": 1.0}
        return {}, {}

    def _move(self, move):
        match move.source, move.target:
            case WeightsFolder(path=path), BankSlot(slot=bank):
                self.bank[bank] = path
            case BankSlot(slot=bank), Idle(name=name):
                assert name not in self.paged
                self.paged[name] = self.bank[bank]
            case Idle(name=name), BankSlot(slot=bank):
                self.bank[bank] = self.paged.pop(name)
            case TrainSlot(slot=slot), BankSlot(slot=bank):
                self.saves += 1
                self.bank[bank] = f"slot {slot} at {self.saves}" if move.also is None else move.also.path
        return dict.fromkeys(move.pair.replies, 0.0)

    def _prefill(self, command):
        rows = command.rows
        per_shard = len(rows.tokens) // len(self.rows)
        logprobs = np.zeros(rows.tokens.shape, np.float32)
        length = rows.tokens.shape[1]
        if command.states is not None:
            self._copy_pages(command.states.page_copies)
            self._copy_states(command.states.copies_before)
            self._read_states(command)
        for start in range(0, per_shard, command.block or per_shard):
            of_rows = slice(start, start + (command.block or per_shard))
            for first in range(0, length, command.piece or length):
                of_tokens = slice(first, first + (command.piece or length))
                self._prefill_block(command, of_rows, of_tokens, logprobs)
        self._copy_pages(command.copies)
        if command.states is not None:
            self._copy_states(command.states.copies_after)
        scores = {} if command.wishes is None else self._scores(command, logprobs)
        return {"logprobs": logprobs, **scores} if command.logprobs else {}

    def _copy_pages(self, copies):
        for shard, (sources, targets) in self._pairs(copies):
            assert len(set(targets)) == len(targets), "two copies to one page"
            assert not set(sources) & set(targets), "a page is copied from and to"
            for kept in (self.tokens, self.versions, self.origins):
                kept[shard, targets] = kept[shard, sources]

    def _copy_states(self, copies):
        for shard, pairs in self._pairs(copies):
            for source, target in pairs.T.tolist():
                self.states[shard][target] = self.states[shard][source]

    def _pairs(self, copies):
        for shard, of_shard in enumerate(copies.reshape(len(self.rows), -1, 2)):
            used = np.flatnonzero(of_shard[:, 1])
            assert list(used) == list(range(len(used))), "copies come first"
            yield shard, of_shard[used].T

    def _read_states(self, command):
        """Let every row read its tokens into its state, one block after another."""
        rows, states = command.rows, command.states
        per_shard = len(rows.tokens) // len(self.rows)
        block = command.block or per_shard
        for start in range(0, per_shard, block):
            here = [row for row in range(len(rows.tokens)) if start <= row % per_shard < start + block]
            before = {row: self.states[row // per_shard][states.sources[row]] for row in here}
            for row, (version, read) in before.items():
                if not states.targets[row]:
                    assert not rows.segments[row].any()
                    continue
                used = rows.segments[row] > 0
                assert set(rows.segments[row][used]) == {1}, "two segments with one state"
                own = self.bank[rows.slots[row]]
                assert version in (None, own), "a state of other weights"
                assert rows.positions[row][used][0] == len(read), "the state has read other tokens"
                self.states[row // per_shard][states.targets[row]] = own, [*read, *rows.tokens[row][used]]
        targets = states.targets.reshape(len(self.rows), -1)
        assert all(len(set(each[each > 0])) == (each > 0).sum() for each in targets), "two rows, one slot"

    def _prefill_block(self, command, of_rows, of_tokens, logprobs):
        """Read the prompts in these rows of every data shard."""
        rows = command.rows
        per_shard, length = len(rows.tokens) // len(self.rows), rows.tokens.shape[1]
        is_here = np.zeros((len(self.rows), per_shard, length), bool)
        is_here[:, of_rows, of_tokens] = True
        used = (rows.segments > 0) & is_here.reshape(-1, length)
        table = 0 if command.tables is None else command.tables.shape[1]
        wishes = command.wishes and (
            command.wishes.top,
            command.wishes.targets.shape[2],
            command.wishes.draws,
        )
        program = command.block or per_shard, command.piece or length, table, command.logprobs, wishes
        for row, column in np.argwhere(used):
            position, page = rows.positions[row, column], command.pages[row, column]
            assert page, "a prompt token goes to the trash page"
            place = row // per_shard, page, position % self.page_size
            self.tokens[place], self.versions[place] = rows.tokens[row, column], self.bank[rows.slots[row]]
            self.origins[place] = program, column % (command.piece or length)
        for row, column in np.argwhere(used):
            seen = self._seen(command, row, column, row // per_shard)
            logprobs[row, column] = score(self.bank[rows.slots[row]], seen, rows.targets[row, column])

    def _seen(self, command, row, column, shard):
        """Return the tokens up to this one, from its row or its pages."""
        rows = command.rows
        position, version = rows.positions[row, column], self.bank[rows.slots[row]]
        if command.tables is None:
            segment = rows.segments[row, column - position : column + 1]
            assert (segment == rows.segments[row, column]).all()
            return rows.tokens[row, column - position : column + 1].tolist()
        assert set(rows.segments[row]) <= {0, 1}, "two segments with one table"
        order = np.arange(position + 1)
        cells = shard, command.tables[row][order // self.page_size], order % self.page_size
        assert set(self.versions[cells]) == {version}, "keys and values of other weights"
        assert command.tables[row][position // self.page_size] == command.pages[row, column]
        return self._content(cells)

    def _content(self, cells):
        tokens = self.tokens[cells].tolist()
        return list(zip(tokens, self.origins[cells].tolist(), strict=True)) if self.exact else tokens

    def _scores(self, command, logprobs):
        """Return scores: likeliest tokens are made up, draws depend on what they must depend on."""
        wishes, rows = command.wishes, command.rows
        shape = rows.tokens.shape
        arrays = {
            "top_tokens": np.tile(np.arange(wishes.top, dtype=np.int32), (*shape, 1)),
            "top_logprobs": np.repeat(logprobs[..., None], wishes.top, 2),
            "target_logprobs": np.where(wishes.targets < 0, 0, -1 - wishes.targets).astype(np.float32),
            "drawn_tokens": np.zeros((*shape, wishes.draws), np.int32),
            "drawn_logprobs": np.zeros((*shape, wishes.draws), np.float32),
        }
        for row, column in np.argwhere(rows.segments > 0):
            seen = self._seen(command, row, column, row // (len(rows.tokens) // len(self.rows)))
            for number in range(wishes.draws):
                drawn = draw(self.bank[rows.slots[row]], seen, [*wishes.seeds[row, column], number])
                arrays["drawn_tokens"][row, column, number] = drawn[0]
                arrays["drawn_logprobs"][row, column, number] = drawn[1]
        return arrays

    def _decode(self, command):
        per_shard = len(command.source) // len(self.rows)
        tokens = np.full((command.steps, len(command.source)), -1, np.int32)
        logprobs, redrawn = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, np.bool_)
        drafts = np.full_like(tokens, NO_DRAFT)
        rows = self.begun(command)
        for step in range(command.steps):
            written = set()
            for index, row in enumerate(rows):
                if row.remaining and not is_follower(command, index):
                    shard, before = index // per_shard, row.expected
                    place = shard, self._step(command, index, shard, row, step)
                    assert place not in written, "two rows write to the same page"
                    written.add(place)
                    tokens[step, index], logprobs[step, index] = row.token, row.logprob
                    redrawn[step, index] = row.is_redrawn
                    if command.depths is not None:
                        drafts[step, index] = row.expected
                        replies = tokens[step], logprobs[step], drafts[step]
                        self._follow(command, index, shard, row, replies, before)
            if command.chunk is not None:
                self._read_part(command.chunk, step, written)
        self.rows = [rows[start : start + per_shard] for start in range(0, len(rows), per_shard)]
        reply = {"tokens": tokens, "logprobs": logprobs}
        if self.expects is not None and command.drafts is not None:
            reply["drafts"] = drafts
        if command.masks is not None:
            reply["redrawn"] = redrawn
        if command.top:
            reply["top_tokens"] = tokens[..., None] + np.arange(command.top, dtype=np.int32)
            reply["top_logprobs"] = np.repeat(logprobs[..., None], command.top, 2)
        return reply

    def _read_part(self, chunk, step, written):
        """Write a step's part of the chunks, whose earlier tokens must be there; ``written``: by rows."""
        count = chunk.tokens.shape[1] // CHUNK_STEPS
        for shard, column in np.argwhere(chunk.positions[:, step * count : (step + 1) * count] >= 0):
            column += step * count
            position, page = chunk.positions[shard, column], chunk.pages[shard, column]
            assert page, "a prompt token goes to the trash page"
            assert page == chunk.tables[shard, position // self.page_size]
            assert (shard, page) not in written, "a row and a prompt write to the same page"
            version, place = self.bank[chunk.slots[shard]], (shard, page, position % self.page_size)
            before = np.arange(position)
            cells = shard, chunk.tables[shard][before // self.page_size], before % self.page_size
            assert set(self.versions[cells]) <= {version}, "keys and values of other weights"
            self.tokens[place], self.versions[place] = chunk.tokens[shard, column], version
            self.origins[place] = "chunk", column % count

    def _follow(self, command, leader, shard, row, replies, expected):
        """Let the followers of a row that has just drawn read drafts; ``replies`` are of this step.

        ``expected`` is what the model has expected in place of the first draft.
        """
        first, goes_on = row.position - 1, True
        begin = first - int(command.positions[leader])  # the drafts are taken one after the other
        for index in range(leader + 1, len(command.source)):
            depth = int(command.depths[index])
            draft = int(command.drafts[leader, begin + depth - 1]) if depth else NO_DRAFT
            if draft == NO_DRAFT and depth == 1:
                draft = expected
            if draft == NO_DRAFT or first + depth >= command.positions[leader] + command.remaining[leader]:
                break
            for name in ("slots", "seeds", "temperatures", "top_k", "top_p", "stop_tokens"):
                assert np.array_equal(getattr(command, name)[index], getattr(command, name)[leader]), name
            if command.states is not None:
                self._keep_aside(command, index, shard)
            goes_on = goes_on and row.remaining > 0 and draft == row.token
            if goes_on:
                self._step(command, leader, shard, row, 0)
                replies[0][index], replies[1][index], replies[2][index] = row.token, row.logprob, row.expected
            else:  # it writes what nobody may read
                page = row.table[(first + depth) // self.page_size]
                assert page, "a follower writes to the trash page"
                self.tokens[shard, page, (first + depth) % self.page_size] = draft
                replies[0][index] = REJECTED

    def begun(self, command):
        """Return the rows of a Decode before its first step."""
        assert command.page_counts.sum() == len(command.pages)
        ends, per_shard = np.cumsum(command.page_counts), len(command.source) // len(self.rows)
        return [
            self._row(command, index, index // per_shard, command.pages[end - count : end].tolist())
            for index, (end, count) in enumerate(zip(ends, command.page_counts, strict=True))
        ]

    def _row(self, command, index, shard, pages):
        source = command.source[index]
        stated = [int(column[index]) for column in (command.tokens, command.positions, command.remaining)]
        if source < 0:
            assert not command.page_places[index]
            return Row(*stated, tuple(pages))
        assert stated == [0, 0, 0]  # the device knows
        row = self.rows[shard][source]
        assert command.page_places[index] == len(row.table)
        return Row(row.token, row.position, row.remaining, (*row.table, *pages))

    def _step(self, command, index, shard, row, step):
        """Draw a row's next token; returns the page that its last one was written to."""
        table = np.array(row.table)
        page = table[row.position // self.page_size]
        assert page, "a live row writes to the trash page"
        version = self.bank[command.slots[index]]
        rows = command.block or len(command.source) // len(self.rows)
        forced = -1 if command.forced is None else command.forced[index, step]
        place = shard, page, row.position % self.page_size
        self.tokens[place], self.versions[place] = row.token, version
        self.origins[place] = (
            rows,
            command.active,
            command.top,
            command.masks is not None,
            command.drafts is None,
        )
        pages = table[np.arange(row.position + 1) // self.page_size]
        cells = shard, pages, np.arange(row.position + 1) % self.page_size
        assert set(self.versions[cells]) == {version}, "keys and values of other weights"
        if command.states is not None:
            self._read_token(command.states[index], version, shard, row, self.tokens[cells].tolist())
        content = self._content(cells)
        row.token, row.logprob = draw(version, content, command.seeds[index])
        row.is_redrawn = False
        if command.masks is not None and command.mask_places[index, step] >= 0:
            mask = command.masks[command.mask_places[index, step]]
            first = row.token
            row.token = redraw_within(mask, first, version, content, command.seeds[index])
            row.is_redrawn = row.token != first
        if forced >= 0:
            row.token, row.logprob = int(forced), 0.0
        row.position += 1
        if self.expects is not None:
            token, _ = draw(version, [*content, row.token], command.seeds[index])
            row.expected = token if self.expects(row.position) else (token + 1) % VOCABULARY
        row.remaining = 0 if row.token in command.stop_tokens[index] else row.remaining - 1
        return page

    def _keep_aside(self, command, index, shard):
        """Write what nobody may read into a follower's slot."""
        slot, per_shard = command.states[index], len(command.source) // len(self.rows)
        of_shard = command.states[shard * per_shard : (shard + 1) * per_shard]
        assert slot, "a follower without a slot for its state"
        assert (of_shard == slot).sum() == 1, "a follower with the state of another row"
        self.states[shard][slot] = "a draft", []

    def _read_token(self, slot, version, shard, row, content):
        assert slot, "a live row without a state"
        known, read = self.states[shard][slot]
        assert known in (None, version), "a state of other weights"
        self.states[shard][slot] = version, [*read, row.token]
        assert [*read, row.token] == content, "the state has read other tokens than the pages hold"


class FakeWorkers:
    """Stands in for all workers: every command is answered in the loop's next turn, in order."""

    busy = None

    def __init__(self, device=None):
        self.device = device or FakeDevice(shards=1, pages=64, page_size=16)
        self.commands = []

    def send(self, command, requests=()):
        self.commands.append(command)
        arrays, metrics = self.device.execute(command)
        reply = Reply(
            generation=1, process=0, sequence=len(self.commands) - 1, arrays=arrays, metrics=metrics
        )
        import asyncio  # which fake workers in processes of their own do without

        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        loop.call_soon(lambda: answer.done() or answer.set_result(reply))
        return answer
