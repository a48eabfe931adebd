"""The commands of protocol.py as methods: host arrays in, device steps, arrays out."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx import protocol
from spmd_tx.models import lora, peft
from spmd_tx.models.config import ModelConfig, read_model_config
from spmd_tx.models.lora import Adapters
from spmd_tx.protocol import AdapterSpec, Setup
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.transfer import rows_to_devices, to_devices
from spmd_tx.sharding.weight import abstract, shardings
from spmd_tx.worker.adapters import make_adapter_steps, one_adapter, slot_weights
from spmd_tx.worker.checkpoints import OnEnd, restore_state, save_state, write_in_background
from spmd_tx.worker.compile_log import CompileLog
from spmd_tx.worker.custom_loss import CustomLosses, inputs_of
from spmd_tx.worker.loss_values import LossProblem
from spmd_tx.worker.losses import TokenLossInputs
from spmd_tx.worker.memory import activation_budget
from spmd_tx.worker.optimizer import AdamWInputs, make_optim_step
from spmd_tx.worker.prompt_scores import ScoreInputs, Widths
from spmd_tx.worker.remat import level_of
from spmd_tx.worker.sample import DecodeRows, make_decode, make_prefill
from spmd_tx.worker.state import WorkerState, allocate
from spmd_tx.worker.train import Rows, make_forward, make_forward_backward

ACTIVE_SLOTS = 4  # adapters of a decode step; with fewer it is one, with more all

Result = tuple[dict[str, Any], dict[str, Any]]  # arrays and metrics; may still be on the device


class Engine:
    """One worker's half of every step. All workers call the same methods in the same order."""

    def __init__(
        self,
        setup: Setup,
        model: ModelConfig,
        mesh: Mesh,
        declared: WorkerState,
        state: WorkerState,
        log: CompileLog,
    ) -> None:
        self.setup, self.model, self.mesh, self.state, self.log = setup, model, mesh, state, log
        self.declared = declared
        self._forward = make_forward(model, mesh, declared.base, declared.train)
        remat = level_of(setup, model, activation_budget(mesh))
        self._forward_backward = make_forward_backward(model, mesh, declared.base, declared.train, remat)
        self._optim_step = make_optim_step(mesh, declared.train)
        self._adapters = make_adapter_steps(mesh, declared.train, declared.bank)
        sampling = (model, mesh, declared.base, declared.bank, declared.cache)
        self._prefill = {wanted: make_prefill(*sampling, logprobs=wanted) for wanted in (False, True)}
        self._scored_prefill = cache(lambda widths: make_prefill(*sampling, logprobs=True, widths=widths))
        self._decode = cache(lambda top: make_decode(*sampling, setup.decode_steps, top))
        self._custom_losses = CustomLosses()
        self.on_snapshot_end: OnEnd = lambda path, problem: None
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))

    @classmethod
    def start(cls, setup: Setup, log: CompileLog, progress: Callable[[str], None]) -> "Engine":
        """Load the base model and allocate everything else."""
        model = read_model_config(Path(setup.model_dir))
        mesh = make_mesh(setup.fsdp, setup.ep, setup.tp)
        declared, state, pages = allocate(setup, model, mesh, progress)
        engine = cls(setup, model, mesh, declared, state, log)
        engine.pages = pages
        return engine

    pages: int = 0  # per data shard, page 0 included

    @property
    def device(self) -> str:
        """The mesh's devices, for people."""
        return f"{self.mesh.size} x {self.mesh.devices.flat[0].device_kind}"

    def create_adapter(self, command: protocol.CreateAdapter) -> Result:
        adapter, seed = command.adapter, command.seed
        seed_2 = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        groups = np.array([adapter.train_attn, adapter.train_mlp, adapter.train_unembed])
        with self.log.first("create_adapter"):
            self.state.train = self._adapters.create(
                self.state.train,
                _i32(command.slot),
                seed_2,
                self._ranks(adapter),
                self._scale(adapter),
                groups,
            )
        return {}, {}

    def forward_backward(self, command: protocol.ForwardBackward) -> Result:
        rows, loss = self._batch(command.rows, command.loss)
        train = self.state.train
        with self.log.first(_program("forward_backward", loss), rows.targets.shape):
            grad_sum, logprobs, losses = self._forward_backward(
                self.state.base, train.w, train.grad_sum, train.scale, rows, loss
            )
        self.state.train = train.with_gradient(grad_sum)
        return {"logprobs": logprobs, "losses": losses}, {}

    def forward(self, command: protocol.Forward) -> Result:
        rows, loss = self._batch(command.rows, command.loss)
        train = self.state.train
        with self.log.first(_program("forward", loss), rows.targets.shape):
            logprobs, losses = self._forward(self.state.base, train.w, train.scale, rows, loss)
        return {"logprobs": logprobs, "losses": losses}, {}

    def custom_loss(self, command: protocol.CustomLoss) -> Result:
        """Only process 0 runs it, because only its reply is read."""
        if jax.process_index() != 0:
            return {}, {}
        inputs = inputs_of(command)
        with self.log.first("custom_loss", *self._custom_losses.programs(command.definition, inputs)):
            try:
                results = self._custom_losses.run(command.definition, inputs)
            except LossProblem as problem:
                return {"problem": np.frombuffer(str(problem).encode(), np.uint8)}, {}
        gradients = np.concatenate([gradient.ravel() for gradient in results.gradients])
        return {"losses": results.losses_D, "metrics": results.metrics_DM, "gradients": gradients}, {}

    def optim_step(self, command: protocol.OptimStep) -> Result:
        inputs = AdamWInputs(
            _f32(command.learning_rate),
            _f32(command.beta1),
            _f32(command.beta2),
            _f32(command.eps),
            _f32(command.weight_decay),
            _f32(command.grad_clip_norm),
        )
        with self.log.first("optim_step"):
            self.state.train, norm, applied = self._optim_step(self.state.train, _i32(command.slot), inputs)
        return {}, {"grad_norm": norm, "applied": applied}

    def save_state(self, command: protocol.SaveState) -> Result:
        slot = self._adapters.read(self.state.train, _i32(command.slot))
        save_state(Path(command.path), slot, command.adapter.rank)
        return {}, {}

    def snapshot(self, command: protocol.Snapshot) -> Result:
        slot = self._adapters.read(self.state.train, _i32(command.slot))
        write_in_background(Path(command.path), slot, command.adapter.rank, self.on_snapshot_end)
        return {}, {}

    def load_state(self, command: protocol.LoadState) -> Result:
        like = abstract(self.mesh, slot_weights(self.declared.train))
        slot = restore_state(Path(command.path), like, command.optimizer)
        self.state.train = self._adapters.write(
            self.state.train, _i32(command.slot), slot, self._scale(command.adapter)
        )
        return {}, {}

    def save_sampler(self, command: protocol.SaveSampler) -> Result:
        one = self._adapters.weights_of(self.state.train.w, _i32(command.slot))
        if command.bank >= 0:
            self._to_bank(one, command.bank, command.adapter)
        if command.path is not None:
            self._write_peft(one, command.path, command.adapter)
        return {}, {}

    def page_out(self, command: protocol.PageOut) -> Result:
        one = self._adapters.weights_of(self.state.bank.w, _i32(command.bank))
        self._write_peft(one, command.path, command.adapter)
        return {}, {}

    def load_sampler(self, command: protocol.LoadSampler) -> Result:
        host = peft.read(Path(command.path), command.adapter, self.model, self.setup.max_rank)
        one = jax.tree.map(to_devices, host, shardings(self.mesh, one_adapter(self.declared.train.w)))
        self._to_bank(one, command.bank, command.adapter)
        return {}, {}

    def prefill(self, command: protocol.Prefill) -> Result:
        what, shape = "prefill with logprobs" if command.logprobs else "prefill", command.rows.tokens.shape
        prefill, wishes, inputs = self._prefill[command.logprobs], command.wishes, None
        if wishes is not None:
            prefill = self._scored_prefill(Widths(wishes.top, wishes.draws))
            inputs = ScoreInputs(wishes.targets, wishes.seeds, wishes.temperatures)
            what, shape = "prefill with scores", (*shape, wishes.top, wishes.targets.shape[2], wishes.draws)
        if command.tables is not None:
            what, shape = f"continued {what}", (*shape, command.tables.shape[1])
        batch = (self._rows(command.rows), command.pages, command.copies, command.tables, inputs)
        batch = rows_to_devices(self.mesh, batch)
        with self.log.first(what, shape):
            self.state.cache, scores, experts = prefill(
                self.state.base, self.state.bank, self.state.cache, *batch
            )
        return _present(**scores, experts=experts), {}

    def decode(self, command: protocol.Decode) -> Result:
        active, slots = _active_slots(command, self.setup.bank_slots)
        fields = {name: getattr(command, name) for name in DecodeRows.__dataclass_fields__} | {"slots": slots}
        rows = rows_to_devices(self.mesh, DecodeRows(**fields))
        shape = (*rows.tables.shape, active.size, *([command.top] if command.top else []))
        with self.log.first("decode", shape):
            self.state.cache, self.state.rows, drawn = self._decode(command.top)(
                self.state.base,
                self.state.bank,
                self.state.cache,
                self.state.rows,
                rows,
                active,
                _i32(command.steps),
            )
        return _present(**vars(drawn)), {}

    def _batch(self, rows: protocol.PackedRows, loss: protocol.LossInputs) -> tuple[Rows, TokenLossInputs]:
        inputs = TokenLossInputs(
            kinds=loss.kinds[:, None],
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            beta=loss.beta[:, None],
            kl_coeff=loss.kl_coeff[:, None],
            weights=loss.weights,
            advantages=loss.advantages,
            sampling_logprobs=loss.sampling_logprobs,
            ratio_mask=loss.ratio_mask,
        )
        return rows_to_devices(self.mesh, (self._rows(rows), inputs))

    def _rows(self, rows: protocol.PackedRows) -> Rows:
        experts = rows.experts if self.model.n_experts else None
        if self.model.n_experts and experts is None:
            # Sent by nobody, but there all the same: with or without, it must be one program.
            shape = (*rows.tokens.shape, self.model.n_layers, self.model.experts_per_token)
            experts = np.full(shape, -1, np.int16)
        return Rows(rows.tokens, rows.targets, rows.segments, rows.positions, rows.slots, experts)

    def _ranks(self, adapter: AdapterSpec) -> np.ndarray:
        """Of linear maps, and of experts."""
        return np.array([adapter.rank, lora.rank_of(self.model, "up", adapter.rank)], np.int32)

    def _scale(self, adapter: AdapterSpec) -> np.ndarray:
        experts = adapter.expert_scale(max(1, self.model.experts_per_token))
        return np.array([adapter.scale, experts], np.float32)

    def _to_bank(self, one: Adapters[Any], bank: int, adapter: AdapterSpec) -> None:
        self.state.bank = self._adapters.to_bank(self.state.bank, one, _i32(bank), self._scale(adapter))

    def _write_peft(self, one: Adapters[Any], path: str, adapter: AdapterSpec) -> None:
        """All processes gather, process 0 writes, and none goes on before the folder is there."""
        whole = self._gather(one)
        if jax.process_index() == 0:
            host = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), whole)
            peft.write(Path(path), host, adapter, self.model, self.setup.model_name)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"peft {path}")


def _active_slots(command: protocol.Decode, bank_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """The bank slots that living rows use, and every row's index among them.

    Their number comes from a short menu, because each number is a program of its own.
    """
    is_used = (command.source >= 0) | (command.remaining > 0)
    used = np.unique(command.slots[is_used]) if is_used.any() else np.zeros(1, np.int32)
    size = next(size for size in (1, ACTIVE_SLOTS, bank_slots) if size >= used.size)
    index = np.searchsorted(used, np.where(is_used, command.slots, used[0]))
    return np.resize(used, size).astype(np.int32), index.astype(np.int32)


def _program(step: str, loss: TokenLossInputs) -> str:
    """The arrays that a batch has decide which program it is for."""
    return step if loss.ratio_mask is None else f"{step} of sequences"


def _present(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}


def _i32(value: int) -> np.ndarray:
    return np.asarray(value, jnp.int32)


def _f32(value: float) -> np.ndarray:
    return np.asarray(value, jnp.float32)
