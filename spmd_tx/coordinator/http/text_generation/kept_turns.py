"""Where a call keeps what it samples: in the trajectory whose base URL it uses, or for a while in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from sqlalchemy import Executable

from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.conversation.messages import Conversation, Message
from spmd_tx.coordinator.conversation.turn_tree import TurnTree
from spmd_tx.coordinator.conversation.turns import SampledTurn, conversation_of
from spmd_tx.coordinator.http.authentication import IN_TRAJECTORY
from spmd_tx.coordinator.http.services import ApiCall, Services
from spmd_tx.coordinator.http.text_generation.choices import PartialSample
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.storage.tables import SamplerRow, TrajectoryRow
from spmd_tx.coordinator.text.conversation_prompts import ConversationPrompt
from spmd_tx.coordinator.trajectories import turn_rows
from spmd_tx.coordinator.trajectories.records import PartialTurn, TurnPrompt, encode, encode_conversation
from spmd_tx.coordinator.trajectories.turn_rows import NewTurn
from spmd_tx.coordinator.wire.sampling import SampleRequest
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequences
from spmd_tx.coordinator.wire.trajectories import KEEP

TOKEN_BYTES = 64  # of work for each token of a sample that is read again, about
MOST_AGENT = 128  # characters of the name of an agent

# Headers by which clients tell their sub-agents apart.
AGENT_HEADERS = ("x-claude-code-agent-id", "x-openai-subagent", "x-agent-id")

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class KeptTurns:
    """Says where the turns of a call are kept."""

    services: Services
    owner: str
    dialect: str
    model: str  # as the client has named it
    trajectory: TrajectoryRow | None  # None: they are kept in memory
    agent: str | None
    are_named: bool = False  # whether later calls may name a turn, and leave out its conversation

    @property
    def keeps_history(self) -> bool:
        """Whether earlier turns stay as they are, also where the chat template would rewrite them."""
        return self.trajectory is not None and self.trajectory.settings.get("history") == KEEP

    async def tree(self, conversation: Conversation, base: ServedBase, size: int) -> TurnTree:
        """Return the turns that a conversation of ``size`` bytes may go on from."""
        if self.trajectory is None:
            memory = self.services.turn_memory
            return await compute(size, memory.tree, self.owner, base.key, conversation.messages)
        return await self._trajectory_tree(self.trajectory)

    async def conversation(self, turn_id: str) -> tuple[Message, ...] | None:
        """Return the conversation that ends with a turn; None if it is not kept, or is another owner's."""
        if self.trajectory is None:
            turn = self.services.turn_memory.find(self.owner, turn_id)
        else:
            turn = (await self._trajectory_tree(self.trajectory)).turns.get(turn_id)
        return None if turn is None else conversation_of(turn)

    async def _trajectory_tree(self, trajectory: TrajectoryRow) -> TurnTree:
        texts = {each.key: await each.model.text.get() for each in self.services.bases.all}
        return await self.services.trajectories.trees.tree(trajectory.id, texts)


@dataclass(frozen=True)
class Keeping:
    """Keeps what is sampled from one prompt."""

    kept: KeptTurns
    tree: TurnTree
    prompt: ConversationPrompt
    conversation: Conversation
    variables: Mapping[str, Any]  # of the chat template
    base: ServedBase

    def with_notes(self, sample: SampleRequest) -> SampleRequest:
        """Have a turn of a trajectory noted for stable_reinforce."""
        if self.kept.trajectory is None:
            return sample
        return msgspec.structs.replace(sample, record_stability_info=True)

    async def statements(self, sampler: SamplerRow, number: int) -> Sequence[Executable]:
        """Return what stores the turn of a request with this number together with it."""
        trajectory, place = self.kept.trajectory, self.prompt.place
        if trajectory is None:
            return ()
        size = 4 * len(self.prompt.tokens)
        turn = NewTurn(
            trajectory_id=trajectory.id,
            session_id=sampler.session_id,
            parent=None if place.parent is None else place.parent.id,
            base=self.base.key,
            model=self.kept.model,
            weights=sampler.model_path or (sampler.id if sampler.model_id is not None else None),
            dialect=self.kept.dialect,
            agent=self.kept.agent,
            cause=place.branch.cause,
            cause_message=place.branch.message,
            reused=self.prompt.reused,
            new=len(self.prompt.tokens) - self.prompt.reused,
            prompt=await compute(size, lambda: encode(self._stored())),
        )
        return turn_rows.insertion(turn, sampler.id, number, clock.now())

    def _stored(self) -> TurnPrompt:
        made, reading = self.prompt, self.prompt.reading
        messages = self.conversation.messages[made.place.known :]
        return TurnPrompt(
            conversation=encode_conversation(messages, self.conversation.known_tools, self.variables),
            stops=list(reading.stops),
            most_calls=reading.most_calls,
            settings=made.settings,
            keys=list(made.place.new_keys),
            last_key=made.place.keys[-1].digest if made.place.keys else b"",
            begun=reading.begun,
            tokens=np.asarray(made.tokens[made.reused :], "<i4").tobytes(),
            dropped=made.dropped,
            has_own_instructions=self.conversation.has_own_instructions and made.place.known == 0,
        )

    async def keep(self, request_id: str, sequences: SampledSequences) -> None:
        """Remember what was sampled, before its client is told of its end."""
        model = await self.base.model.text.get()
        for number in range(len(sequences)):
            tokens = sequences[number].tokens
            work = TOKEN_BYTES * len(tokens)
            turn, _ = await compute(work, self.prompt.turn, model, f"{request_id}:{number}", tokens)
            await self._remember(turn)

    async def _remember(self, turn: SampledTurn) -> None:
        if self.kept.trajectory is None:
            turn = turn if self.kept.are_named else replace(turn, asked=None)
            self.kept.services.turn_memory.add(self.tree, turn)
        else:
            await self.kept.services.trajectories.trees.add(self.kept.trajectory.id, turn)

    def cut(self, request_id: str, drawn: Sequence[PartialSample]) -> None:
        """Keep what is drawn when the client hangs up."""
        if self.kept.trajectory is not None:
            samples = [
                PartialTurn(list(each.tokens), list(each.logprobs), list(each.forced)) for each in drawn
            ]
            self.kept.services.trajectories.cut_later(self.kept.trajectory.id, request_id, samples)


async def of_this_trajectory(connection: ASGIConnection, _: BaseRouteHandler) -> None:
    """Refuse the key of another trajectory, also where nothing is sampled. A guard of routes."""
    services: Services = connection.app.state.services
    name = connection.path_params[IN_TRAJECTORY]
    await services.trajectories.check_key(connection.scope["auth"], name)


async def kept_turns(call: ApiCall, dialect: str, model: str) -> KeptTurns:
    """Return where a call keeps its turns. Raises InvalidRequest, Forbidden or NotFound."""
    name, trajectory = call.request.path_params.get(IN_TRAJECTORY), None
    if name is not None:
        trajectory = await call.services.trajectories.open_to_sample(call.caller, name)
    agent = next((value for each in AGENT_HEADERS if (value := call.request.headers.get(each))), None)
    agent = agent and agent[:MOST_AGENT]
    return KeptTurns(call.services, call.caller.owner, dialect, model, trajectory, agent)


def with_settings(body: Body, kept: KeptTurns) -> Body:
    """Return the body of a call with what its trajectory says, and what of sampling it leaves out."""
    if kept.trajectory is None:
        return body
    settings = {
        name: value
        for name, value in kept.trajectory.settings.items()
        if value is not None and hasattr(body, name) and getattr(body, name) is None
    }
    model = {} if kept.trajectory.model is None else {"model": kept.trajectory.model}
    return msgspec.structs.replace(body, **settings, **model)
