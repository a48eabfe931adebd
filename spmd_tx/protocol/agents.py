"""The contract between the coordinator and the agents, which start and end one worker process each."""

import msgspec

from spmd_tx.protocol.commands import unpack_array
from spmd_tx.protocol.reports import PROTOCOL_VERSION, AnyReport

# What a connection may be silent until it is closed. ZeroMQ asks and answers in threads of its own.
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 15_000


class AgentReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=True):
    """What an agent says."""

    process: int  # whose agent it is


class AgentHello(AgentReport, frozen=True, tag="agent_hello"):
    """First message over every connection. No worker of this agent is alive then."""

    instance: str  # the same for as long as the agent runs
    host: str  # its name
    address: str  # under which the coordinator's host reaches this one
    coordinator: str  # host name under which the agent reaches the coordinator
    devices: int | None = None  # that its worker is to have; None: as many as the mesh asks for
    version: int = PROTOCOL_VERSION


class AgentBeat(AgentReport, frozen=True, tag="agent_beat"):
    """The agent is alive."""


class WorkerEnded(AgentReport, frozen=True, tag="worker_ended"):
    """The worker process of a generation is gone."""

    generation: int
    code: int  # negative: the signal that killed it
    last_lines: list[str]
    is_out_of_memory: bool = False  # the kernel has killed processes of its host or container just then


class AgentRefuses(AgentReport, frozen=True, tag="agent_refuses"):
    """This host cannot take part, and the agent ends."""

    reason: str


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=True):
    """What an agent is told."""


class StartWorker(Order, frozen=True, tag="start_worker"):
    """Start a worker process, after the end of any before it."""

    generation: int
    devices: int  # of the process
    device_ids: list[int] | None  # those of this host that it takes; None: all
    model_dir: str  # where the coordinator has the base model
    model_files: dict[str, str]  # what it consists of there; see model_fingerprint.py


class StopWorker(Order, frozen=True, tag="stop_worker"):
    """Kill the worker process, which may hang; answered by WorkerEnded, also when there is none."""

    generation: int


class Refused(Order, frozen=True, tag="refused"):
    """The answer to an AgentHello that does not fit."""

    reason: str
    is_final: bool  # else the agent may say hello again in a while


class Quit(Order, frozen=True, tag="quit"):
    """The server ends, and its agents with it."""


class Ping(Order, frozen=True, tag="ping"):
    """Nothing; but if it cannot be sent, the agent is gone."""


AnyAgentReport = AgentHello | AgentBeat | WorkerEnded | AgentRefuses
AnyOrder = StartWorker | StopWorker | Refused | Quit | Ping

decode_order = msgspec.msgpack.Decoder(AnyOrder).decode
decode_any_report = msgspec.msgpack.Decoder(AnyReport | AnyAgentReport, dec_hook=unpack_array).decode
