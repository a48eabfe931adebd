"""Example commands, one for each program that clients can need: programs are compiled for them."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from spmd_tx.models.declared.tower import MERGED, PATCH_NUMBERS
from spmd_tx.models.grammar_draw import WORD
from spmd_tx.models.linear_attention.state_pool import Keep
from spmd_tx.protocol import commands
from spmd_tx.protocol.commands import DRAFT_TOKENS, STATE_COPIES, STOP_TOKENS
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.sharding.weight import abstract
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.calls import Calls
from spmd_tx.worker.state import declare

OPTIMIZER_STEPS = {
    "optim_step": commands.OptimStep(
        slot=0, learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    ),
    "dimuon_step": commands.DimuonStep(slot=0, rank=1, learning_rate=0.0, beta1=0.9, grad_clip_norm=0.0),
}


def menu_of(plan: Plan, mesh: Mesh) -> "Menu":
    """Return the menu of an engine with this plan."""
    return Menu(Calls(plan, mesh, declare(plan)))


class Menu:
    """Makes calls with abstract arrays."""

    def __init__(self, calls: Calls) -> None:
        self._plan, self._calls = calls.plan, calls
        self._has_states = isinstance(calls.declared.cache, Keep)
        self._state = abstract(calls.mesh, calls.declared)

    def calls(self, shape: ProgramShape) -> Sequence[Call]:
        """Return the calls of a command of this shape."""
        state, calls = self._state, self._calls
        match shape.step:
            case "optim_step" | "dimuon_step" as step:
                return [calls.trained.optim_step(state, OPTIMIZER_STEPS[step])]
            case "forward":
                return [*calls.forward(state, commands.Forward(rows=_rows(shape), loss=_loss(shape)))]
            case "forward_backward":
                command = commands.ForwardBackward(rows=_rows(shape), loss=_loss(shape))
                return [*calls.forward_backward(state, command)]
            case "prefill":
                command = self._prefill(shape)
                prefills = [call for call in calls.prefill(state, command) if call is not None]
                moves = command.states
                states = [] if moves is None else [calls.copy_states(state, moves.copies_after)]
                return [*prefills, calls.copy_pages(state, command.copies), *states]
            case "encode_images":
                return [calls.encode_images(state, _encode_images(shape.patches))]
            case "decode":
                command = self._decode(shape)
                return [*calls.decode(state, command), *calls.place_tables(state, command)]
            case step:
                return calls.trained.moves(step, state)

    def _prefill(self, shape: ProgramShape) -> commands.Prefill:
        tables = np.zeros((shape.rows, shape.table), np.int32) if shape.table else None
        copies, by_row = np.zeros((self._plan.rows_of_decode, 2), np.int32), np.zeros(shape.rows, np.int32)
        states = None
        if self._has_states:
            of_states = np.concatenate([copies] * STATE_COPIES)
            states = commands.PrefillStates(
                sources=by_row,
                targets=by_row,
                page_copies=copies,
                copies_before=of_states,
                copies_after=of_states,
            )
        return commands.Prefill(
            rows=_rows(shape),
            pages=np.zeros((shape.rows, shape.row_length), np.int32),
            copies=copies,
            logprobs=shape.logprobs,
            wishes=_wishes(shape),
            tables=tables,
            states=states,
        )

    def _decode(self, shape: ProgramShape) -> commands.Decode:
        rows, setup = shape.rows, self._plan.sizes.setup
        has_forced = setup.batch_invariant or shape.masked
        words = -(-self._plan.sizes.model.vocab_size // WORD)
        return commands.Decode(
            steps=1,
            source=np.full(rows, -1, np.int32),
            tokens=np.zeros(rows, np.int32),
            positions=np.zeros(rows, np.int32),
            remaining=np.ones(rows, np.int32),
            slots=np.arange(rows, dtype=np.int32) % shape.active,
            seeds=np.zeros((rows, 2), np.uint32),
            temperatures=np.ones(rows, np.float32),
            top_k=np.ones(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            stop_tokens=np.full((rows, STOP_TOKENS), -1, np.int32),
            pages=np.zeros(1, np.int32),
            page_counts=(np.arange(rows) == 0).astype(np.int32),
            page_places=np.zeros(rows, np.int32),
            top=shape.top,
            active=shape.active,
            forced=np.full((rows, setup.decode_steps), -1, np.int32) if has_forced else None,
            masks=np.zeros((0, words), np.uint32) if shape.masked else None,
            mask_places=np.full((rows, setup.decode_steps), -1, np.int32) if shape.masked else None,
            states=np.zeros(rows, np.int32) if self._has_states else None,
            depths=np.zeros(rows, np.int32) if shape.speculative else None,
            drafts=np.full((rows, DRAFT_TOKENS), -1, np.int32) if shape.speculative else None,
            chunk=self._chunk(shape.chunk) if shape.chunk else None,
        )

    def _chunk(self, tokens: int) -> commands.PromptChunk:
        sizes = self._plan.sizes
        by_token = np.zeros((sizes.data_shards, tokens), np.int32)
        return commands.PromptChunk(
            tokens=by_token,
            positions=by_token,
            pages=by_token,
            slots=by_token[:, 0],
            tables=np.zeros((sizes.data_shards, sizes.widest_table // sizes.setup.page_size), np.int32),
        )


def _encode_images(patches: int) -> commands.EncodeImages:
    return commands.EncodeImages(
        patches=np.zeros((1, patches, PATCH_NUMBERS), np.uint8),
        grids=np.zeros((1, 2), np.int32),
        rows=np.zeros((1, patches // MERGED), np.int32),
    )


def _rows(shape: ProgramShape) -> commands.PackedRows:
    tokens = np.ones((shape.rows, shape.row_length), np.int32)
    targets = np.zeros((*tokens.shape, shape.targets), np.int32) if shape.targets else tokens
    slots = np.zeros(shape.rows, np.int32)
    return commands.PackedRows(tokens=tokens, targets=targets, segments=tokens, positions=tokens, slots=slots)


def _loss(shape: ProgramShape) -> commands.LossInputs:
    per_row = np.zeros(shape.rows, np.float32)
    per_token = np.zeros((shape.rows, shape.row_length), np.float32)
    weights = np.zeros((*per_token.shape, shape.targets), np.float32) if shape.targets else per_token
    return commands.LossInputs(
        kinds=np.zeros(shape.rows, np.int32),
        clip_low=per_token,
        clip_high=per_token,
        beta=per_row,
        kl_coeff=per_row,
        weights=weights,
        advantages=per_token,
        sampling_logprobs=per_token,
        ratio_mask=per_token if shape.sequences else None,
    )


def _wishes(shape: ProgramShape) -> commands.PromptWishes | None:
    if not (shape.top or shape.named or shape.draws):
        return None
    size = shape.rows, shape.row_length
    return commands.PromptWishes(
        top=shape.top,
        targets=np.zeros((*size, shape.named), np.int32),
        draws=shape.draws,
        seeds=np.zeros((*size, 2), np.uint32),
        temperatures=np.ones(size, np.float32),
    )
