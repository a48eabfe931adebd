"""Makes what each generation of workers gets anew: its plan and its parts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from sqlalchemy import update

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.agent.base_model import fingerprint
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.catalog.catalog import Catalog
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.mesh.compilation import Compilation
from spmd_tx.coordinator.mesh.generations import GenerationPlan
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.mesh.program_orders import ProgramOrders
from spmd_tx.coordinator.mesh.program_uses import ProgramUses
from spmd_tx.coordinator.mesh.roster import HostDevices
from spmd_tx.coordinator.runtime.at_work import AtWork
from spmd_tx.coordinator.sampling.bank import VersionBank
from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.new_job import SamplingModel
from spmd_tx.coordinator.sampling.progress import SampleProgress
from spmd_tx.coordinator.sampling.routing_notes import RoutingFiles
from spmd_tx.coordinator.sampling.shapes import SamplingLimits
from spmd_tx.coordinator.sampling.stability_notes import StabilityFiles
from spmd_tx.coordinator.sampling.version_store import VersionStore
from spmd_tx.coordinator.sampling.versions import Versions
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.server.mesh_choice import MeshChoice
from spmd_tx.coordinator.server.preflight import check_mesh, check_pages
from spmd_tx.coordinator.server.served_model import OpenedModel
from spmd_tx.coordinator.server.shapes import make_menu, sampling_shapes, training_shapes
from spmd_tx.coordinator.server.worker_setup import bank_slots, make_setup
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.outages import retry_through_outages
from spmd_tx.coordinator.storage.tables import ServerState
from spmd_tx.coordinator.training.custom_loss_catalog import CustomLossCatalog
from spmd_tx.coordinator.training.custom_loss_runs import LossRuns
from spmd_tx.coordinator.training.execute import Training
from spmd_tx.coordinator.training.slots import TrainingSlots
from spmd_tx.errors import DatabaseDamaged
from spmd_tx.protocol.memory_plan import MemoryPlan


async def make_plan(mesh: MeshChoice, model: OpenedModel, database: Database) -> GenerationPlan:
    """Make the plan for all generations, or one that ``settle`` completes when the devices are known."""
    plan = GenerationPlan(
        model_files=model.files or await asyncio.to_thread(fingerprint, model.directory),
        find_files=partial(fingerprint, model.directory),
        revision=model.commit,
        command_timeout=mesh.config.command_timeout,
        next_number=partial(next_generation, database),
    )

    def completed(config: ServerConfig) -> GenerationPlan:
        check_mesh(config, model.config)
        setup = make_setup(config, model.directory, model.max_context, model.config.expert_lora)
        if model.images is None:
            setup = msgspec.structs.replace(setup, image_tokens=0)
        return replace(plan, setup=setup, devices=config.devices_per_process)

    async def settle(devices: Sequence[HostDevices]) -> GenerationPlan:
        return completed(await mesh.settle(devices))

    return replace(plan, settle=settle) if mesh.config.mesh is None else completed(mesh.config)


async def next_generation(database: Database) -> int:
    """Count up to a number that no generation has had, which tells its messages from older ones."""
    count = (
        update(ServerState).values(generation=ServerState.generation + 1).returning(ServerState.generation)
    )

    async def counted() -> int | None:
        async with database.transaction() as db:
            return (await db.execute(count)).scalar_one_or_none()

    number = await retry_through_outages(counted)
    if number is None:
        raise DatabaseDamaged("the table server has lost its row; restore the database from a backup")
    return number


@dataclass(frozen=True)
class GenerationBuilder:
    """Makes the parts that every generation of workers gets anew."""

    mesh: MeshChoice
    base: ServedBase
    catalog: Catalog
    checkpoints: CheckpointCatalog
    store: VersionStore
    snapshots: Snapshots
    custom_losses: CustomLossCatalog
    loss_runs: LossRuns
    progress: SampleProgress
    at_work: AtWork
    uses: ProgramUses

    @property
    def config(self) -> ServerConfig:
        """The configuration, with the mesh that workers have."""
        return self.mesh.config

    def make(self, workers: Hub, plan: MemoryPlan) -> GenerationParts:
        """Make the parts for workers that hold nothing yet; the model's text must be loaded."""
        config, model = self.config, self.base.model
        check_pages(plan.pages, config.page_size, model.max_context)
        bank = VersionBank(bank_slots(config), self.store.directory, whole_models=config.full_parameters)
        versions = Versions(
            self.catalog,
            partial(self.checkpoints.open, base=self.base.checkpoints),
            bank,
            self.store,
            config.max_rank,
            self.snapshots.writes,
        )
        ahead = (
            make_menu(config, model.config, model.max_context, plan) if config.warm_up == "background" else []
        )
        orders = ProgramOrders(
            (program for program in ahead if program not in workers.avoided),
            aside=workers.compiles_aside,
            threads=workers.compile_threads,
            uses=self.uses,
        )
        fsdp, ep, tp = config.mesh or (1, 1, 1)
        pool = ImagePool(plan.image_tokens, fsdp * ep * tp, model.config.vocab_size)
        return GenerationParts(
            workers=workers,
            training=self._training(versions, plan, pool, workers.kernels),
            versions=versions,
            sampling=self._sampling(bank, orders, plan, pool),
            grammars=self.base.grammars,
            compilation=Compilation(workers, orders),
            trains=config.trains,
        )

    def _training(self, versions: Versions, plan: MemoryPlan, pool: ImagePool, kernels: str) -> Training:
        config, model = self.config, self.base.model
        return Training(
            checkpoints=self.checkpoints,
            base=self.base.checkpoints,
            samplers=self.catalog,
            versions=versions,
            slots=(
                TrainingSlots(1, until_session_ends=True)
                if config.full_parameters
                else TrainingSlots(plan.adapter_slots)
            ),
            limits=self.base.limits,
            shapes=replace(training_shapes(config, model.config, model.max_context, plan), kernels=kernels),
            snapshots=self.snapshots,
            stability=StabilityFiles(config.data_dir),
            custom_losses=self.custom_losses,
            loss_runs=self.loss_runs,
            routing=RoutingFiles(config.data_dir) if model.config.n_experts else None,
            images=self.base.images,
            pool=pool,
        )

    def _sampling(
        self, bank: VersionBank, orders: ProgramOrders, plan: MemoryPlan, pool: ImagePool
    ) -> SampleBatch:
        config, model = self.config, self.base.model
        limits = SamplingLimits(
            shapes=sampling_shapes(config, model.max_context, plan),
            pages_per_shard=plan.pages,
            decode_steps=config.decode_steps,
            state_slots=plan.state_slots,
        )
        text = model.text.loaded
        sampled = SamplingModel(
            *(model.config, model.max_context, text.tokenizer, text.eos_token_ids, config.batch_invariant),
            images=pool,
        )
        return SampleBatch(sampled, bank, limits, orders, self.progress.hear, self.at_work)
