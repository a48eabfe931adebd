"""The messages between the coordinator and the agents, which start and end one worker process each."""

import msgspec

from spmd_tx.protocol.encoding import unpack_array
from spmd_tx.protocol.reports import PROTOCOL_VERSION, AnyReport

# For how long a connection may be silent before it is closed. ZeroMQ sends heartbeats in its own threads.
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 15_000


ANY_PROCESS = -1  # an agent's number until the coordinator has given it one


class AgentReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=True):
    """Base of what an agent reports."""

    process: int  # whose agent it is, or ANY_PROCESS


class AgentHello(AgentReport, frozen=True, tag="agent_hello"):
    """Opens every connection. No worker of this agent is alive then."""

    instance: str  # the same for as long as the agent runs
    host: str  # its name
    address: str  # under which the coordinator's host reaches this one
    coordinator: str  # address under which the agent reaches the coordinator
    devices: int | None = None  # for its worker; None: as many as the mesh asks for
    group: str = ""  # that it joins; empty: the first one
    is_placed: bool = False  # whether the coordinator has chosen replica and number; no agent says so
    version: int = PROTOCOL_VERSION


class AgentBeat(AgentReport, frozen=True, tag="agent_beat"):
    """Says that the agent is alive."""


class WorkerEnded(AgentReport, frozen=True, tag="worker_ended"):
    """Says that the worker process of a generation has ended."""

    generation: int
    code: int  # negative: the signal that killed it
    last_lines: list[str]
    is_out_of_memory: bool = False  # whether the kernel killed processes of its host or container then


class DevicesFound(AgentReport, frozen=True, tag="devices_found"):
    """Answers CountDevices: the devices of a kind that the agent's host has, and its worker may use."""

    kind: str  # "cpu", "gpu", "tpu" ...
    count: int
    bytes: int | None = None  # of each; None: their memory is the host's
    visible: str = ""  # how a launcher has restricted the process to some of the host's devices


class AgentRefuses(AgentReport, frozen=True, tag="agent_refuses"):
    """Says that this host cannot take part; the agent ends."""

    reason: str


class AgentLeaves(AgentReport, frozen=True, tag="agent_leaves"):
    """Says that this host is wanted elsewhere; Quit answers it as soon as its worker is not needed."""

    seconds: float  # until the agent ends anyway


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=True):
    """Base of what an agent is told."""


class CountDevices(Order, frozen=True, tag="count_devices"):
    """Asks which devices there are; DevicesFound answers it."""


class StartWorker(Order, frozen=True, tag="start_worker"):
    """Asks for a worker process, after any earlier one has ended."""

    generation: int
    process: int  # the number of the worker
    devices: int  # of the process
    device_ids: list[int] | None  # which devices of this host it uses; None: all
    model_dir: str  # where the coordinator has the base model
    model_files: dict[str, str]  # fingerprints of its files there, by name
    revision: str | None = None  # the commit of a host's own Hugging Face ID; None: the host's main


class StopWorker(Order, frozen=True, tag="stop_worker"):
    """Asks to kill the worker process, which may hang. WorkerEnded answers it, even if there is none."""

    generation: int


class Refused(Order, frozen=True, tag="refused"):
    """Answers an AgentHello that does not fit."""

    reason: str
    is_final: bool  # False: the agent may try again later


class Quit(Order, frozen=True, tag="quit"):
    """Says that the server ends; its agents end, too."""


class Ping(Order, frozen=True, tag="ping"):
    """Asks for nothing; if it cannot be sent, the agent is gone."""


AnyAgentReport = AgentHello | AgentBeat | WorkerEnded | DevicesFound | AgentRefuses | AgentLeaves
AnyOrder = CountDevices | StartWorker | StopWorker | Refused | Quit | Ping

decode_order = msgspec.msgpack.Decoder(AnyOrder).decode
decode_any_report = msgspec.msgpack.Decoder(AnyReport | AnyAgentReport, dec_hook=unpack_array).decode
