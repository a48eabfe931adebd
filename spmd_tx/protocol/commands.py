"""The commands from the coordinator to all workers, which answer with reports (reports.py).

Coordinator and workers share this package and import nothing else of each other. Dimension key for arrays:
B rows (split evenly over the data shards, in order), T row length in tokens, J targets per position (where
there are several), N pages in a row's table, C page copies, M new pages or masks, K decode steps, V
vocabulary, E images, P patches of an image, padded. A *data shard* is one (fsdp, ep) coordinate of the mesh.
"""

import msgspec
import numpy as np

from spmd_tx.custom_loss.limits import LossLimits
from spmd_tx.protocol.optimizers import OptimizerName
from spmd_tx.protocol.places import PAIRS, AnyPlace, Idle, Pair, WeightsFolder
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.ranks import expert_rank

# A loss's position in this tuple is its number on the wire (LossInputs.kinds).
LOSS_NAMES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")

SPARE_BANK_SLOTS = 2  # in the sampler bank: one for the base model, one free for the next save
FEWEST_PATCHES = 256  # for which images are encoded; smaller ones are padded
PREFILL_TOKENS = 1024  # maximum of one Prefill, per data shard
SEGMENTS_PER_ROW = 64  # maximum in PackedRows
MAX_TARGETS = 256  # per position
STATE_COPIES = 2  # times the rows of a Decode: how many states a Prefill may copy before it, and after it
STOP_TOKENS = 8  # stop ids that a decode row checks on the device; the coordinator checks all of them
CHUNK_STEPS = 4  # of a Decode that reads a chunk of a prompt: a quarter in each
DRAFT_TOKENS = 96  # of a row, which a Decode may be given
MOST_FOLLOWERS = 7  # of a row
REJECTED = -2  # in place of a token that a follower has drawn behind a wrong draft
MASKS_OF_ROW = 4  # of tokens that a grammar allows, in one Decode
ACTIVE_SIZES = 4, 8, 16, 32  # adapters of a decode step, where a bank has half as many again; or one, or all


def active_sizes(rows: int, bank_slots: int) -> list[int]:
    """Return the numbers of adapters for which decode steps of so many rows are compiled, ascending."""
    sizes = sorted({1, *(size for size in ACTIVE_SIZES if 3 * size <= 2 * bank_slots), bank_slots})
    return [size for place, size in enumerate(sizes) if not place or sizes[place - 1] < rows]


def padded_patches(count: int) -> int:
    """Return with how many patches an image of ``count`` patches is encoded: a power of two.

    It depends on the image alone, so that its tokens have the same bits in any company.
    """
    return max(FEWEST_PATCHES, 1 << (count - 1).bit_length())


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a LoRA adapter and how it is trained, without its weights."""

    rank: int  # 0: all weights of the model are trained, and there is no adapter
    alpha: float = 32.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    optimizer: OptimizerName = "adamw"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def expert_scale(self, experts_per_token: int) -> float:
        return self.alpha / expert_rank(self.rank, experts_per_token)


class PackedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Holds token segments packed into rows; all segments of a row use the row's adapter."""

    tokens: np.ndarray  # int32 [B, T]; from the vocabulary's size on, rows of the pool of images' tokens
    # int32 [B, T] or [B, T, J]: the tokens whose log-probabilities are wanted at each position
    targets: np.ndarray
    segments: np.ndarray  # int32 [B, T]: 1, 2, ... within a row; 0 is padding
    positions: np.ndarray  # int32 [B, T]: position within the segment, from 0
    slots: np.ndarray  # int32 [B]: training slot, or bank slot for Prefill
    # int16 [B, T, L, k]: experts to use; -1: the router chooses. None: it always does.
    experts: np.ndarray | None = None
    # int32 [B, T, 3]: time, row and column of each token, by which it is rotated. None: its position is all
    # three. Only workers with a pool of images' tokens read it.
    places: np.ndarray | None = None


class LossInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the losses need for each token, and the loss and its parameters for each row."""

    kinds: np.ndarray  # int32 [B]: index into LOSS_NAMES
    clip_low: np.ndarray  # float32 [B, T]
    clip_high: np.ndarray  # float32 [B, T]; for stable_reinforce the truncation threshold
    beta: np.ndarray  # float32 [B]
    kl_coeff: np.ndarray  # float32 [B]; stable_reinforce only
    weights: np.ndarray  # float32, like the targets; cross_entropy only
    advantages: np.ndarray  # float32 [B, T]
    sampling_logprobs: np.ndarray  # float32 [B, T], nats
    ratio_mask: np.ndarray | None = None  # float32 [B, T]; present if and only if all rows use gspo


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=True):
    """Base of the steps that all workers take together, in broadcast order."""

    @property
    def name(self) -> str:
        """Names the kind of command in metrics and traces."""
        return str(self.__struct_config__.tag)


class ForwardBackward(Command, frozen=True, tag="forward_backward"):
    """Adds a micro-batch's gradients to their slots.

    Replies logprobs, float32 like the targets, and losses, float32 [B, T].
    """

    rows: PackedRows
    loss: LossInputs
    block: int = 0  # rows of each data shard that are computed at once, and added in turn; 0: all


class Forward(Command, frozen=True, tag="forward"):
    """Computes what ForwardBackward replies, without gradients."""

    rows: PackedRows
    loss: LossInputs
    block: int = 0


class CustomLoss(Command, frozen=True, tag="custom_loss"):
    """Begins to run a custom loss on the logprobs of a forward pass. I inputs, D datums.

    It does not need the model, so it runs beside other commands, in child processes of process 0. The reply
    only says that it has begun; CustomLossNews and CustomLossEnd (reports.py) tell the rest.
    """

    number: int  # of this run, in this generation
    tenant: str  # its owner; tenants take turns
    definition: bytes  # custom_loss.Definition in JSON
    lengths: np.ndarray  # int32 [D]: tokens
    widths: np.ndarray  # int32 [I, D]: K of an input [T, K]; 0 for one without that dimension
    values: list[np.ndarray]  # of each input, all datums end to end; logprobs first
    limits: LossLimits | None = None


class OptimStep(Command, frozen=True, tag="optim_step"):
    """Updates one slot with AdamW from its accumulated gradient, which is then zeroed.

    Replies the metrics ``grad_norm``, ``grad_norm_attn``, ``_mlp`` and ``_unembed``, and ``applied``. If the
    gradient or the updated weights are not finite, only the gradient changes and ``applied`` is 0.
    """

    slot: int
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # decoupled
    grad_clip_norm: float  # global L2 norm; 0.0 disables clipping


class DimuonStep(Command, frozen=True, tag="dimuon_step"):
    """Does what OptimStep does, with Dimuon (worker/steps/dimuon.py). Replies the same."""

    slot: int
    rank: int  # of the adapter
    learning_rate: float
    beta1: float
    grad_clip_norm: float  # as in OptimStep


class Move(Command, frozen=True, tag="move"):
    """Moves or copies what is trained from one place to another, by one of the PAIRS of places.

    A slot or folder keeps its content; what was idle is gone from there. The reply has the metrics of the
    pair. Where weights go into a folder it says that the copy is on its way, and Written says that the folder
    is complete.
    """

    source: AnyPlace
    target: AnyPlace
    # As saved; its rank may be smaller than this server's maximum. None: not needed between a slot and what
    # is idle, except into a bank slot.
    adapter: AdapterSpec | None = None
    # Whether a state is read with the optimizer's; otherwise its moments start at zero.
    with_optimizer: bool = False
    # Whether a state is written while later commands run. The reply says that the copy is taken; Written says
    # that the files are complete. Only one such move runs at a time.
    in_background: bool = False
    also: WeightsFolder | None = None  # the weights that go into a bank slot are also written there

    @property
    def pair(self) -> Pair:
        return PAIRS[type(self.source), type(self.target)]

    @property
    def name(self) -> str:
        return "snapshot" if self.in_background else self.pair.step


class Drop(Command, frozen=True, tag="drop"):
    """Deletes what is idle in these places."""

    places: list[Idle]


class PromptWishes(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a Prefill for more than log-probabilities of the prompt tokens. A width of 0 asks for nothing."""

    top: int  # how many of the likeliest tokens
    targets: np.ndarray  # int32 [B, T, W]: tokens whose log-probabilities are wanted; -1: none
    draws: int  # how many tokens to draw
    seeds: np.ndarray  # uint32 [B, T, 2]; the draws of a position depend on it and on these
    temperatures: np.ndarray  # float32 [B, T], of the draws; 0 is greedy


class PrefillStates(msgspec.Struct, frozen=True, kw_only=True):
    """Says which states a Prefill moves, for a model that keeps one of each sequence.

    Slots are numbered per data shard; slot 0 holds the state of a sequence that has read nothing. Copies are
    pairs (from, to), int32 [C, 2], which split over the data shards like Prefill.copies; those of states run
    one after another. ``page_copies`` and ``copies_before`` run first of all, ``copies_after`` last.
    """

    sources: np.ndarray  # int32 [B]: the slot from which each row goes on
    targets: np.ndarray  # int32 [B]: the slot in which it leaves its state; 0 for an empty row
    page_copies: np.ndarray
    copies_before: np.ndarray
    copies_after: np.ndarray


class EncodeImages(Command, frozen=True, tag="encode_images"):
    """Makes tokens of images, and leaves them in rows of the pool that extends the vocabulary.

    Each device encodes one image, so there are as many images as devices at most. All have the same
    ``padded_patches``. Commands that come later may read the rows.
    """

    patches: np.ndarray  # uint8 [E, P, 768]: pixels by channel, row and column, in blocks of 2 x 2 patches
    grids: np.ndarray  # int32 [E, 2]: rows and columns of patches, which are even
    rows: np.ndarray  # int32 [E, P / 4]: of the pool, for each token; -1 behind the image's end


class Prefill(Command, frozen=True, tag="prefill"):
    """Writes the keys and values of prompts into pages.

    A prompt of n tokens brings its first n-1 tokens (the last one is the first input of Decode);
    ``rows.targets`` holds the next tokens, so that the logprobs [B, T] are those of the prompt. With
    ``wishes`` the reply has ``top_tokens`` and ``top_logprobs`` [B, T, top], the likeliest first and the
    lowest id first among equals, ``target_logprobs`` [B, T, W], ``drawn_tokens`` and ``drawn_logprobs``
    [B, T, draws]. ``copies`` run after the writes. For a mixture of experts the reply has the ``experts``
    [B, T, L, k] that were used. Pages are numbered per data shard; what goes to
    page 0 is not kept.
    """

    rows: PackedRows
    pages: np.ndarray  # int32 [B, T]: page of each token; its place in it is position % page_size
    # int32 [C, 2]: (from, to) pages; C splits over the data shards like B, and in each the pairs (0, 0) come
    # last. No page is copied to twice, or both from and to.
    copies: np.ndarray
    logprobs: bool  # whether to compute and reply logprobs, float32 [B, T]
    wishes: PromptWishes | None = None  # with logprobs only
    # int32 [B, N]: the pages of each row's only segment, whose positions need not begin at 0: earlier ones
    # are written by earlier commands or by this one. None: all segments are complete.
    tables: np.ndarray | None = None
    # Rows of each data shard that the program takes at once; 0: all. One block may read what those before it
    # have written.
    block: int = 0
    piece: int = 0  # tokens of a row that it takes at once, in order; 0: all
    # Present if and only if the model keeps a state of each sequence; then a row has one segment.
    states: PrefillStates | None = None


class PromptChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a chunk of one prompt of each data shard, which the CHUNK_STEPS steps of a Decode read.

    Each step reads as many of the C tokens, and writes their keys and values as a Prefill does. None of them
    is the prompt's last token. D data shards.
    """

    tokens: np.ndarray  # int32 [D, C]
    positions: np.ndarray  # int32 [D, C]; -1: padding
    pages: np.ndarray  # int32 [D, C]: page of each token, as in a Prefill
    slots: np.ndarray  # int32 [D]: bank slot
    tables: np.ndarray  # int32 [D, N], as in a Prefill


class Decode(Command, frozen=True, tag="decode"):
    """Runs up to ``steps`` decode steps for B rows. Replies tokens int32 [K, B], logprobs float32 [K, B].

    A row's last token, position, number of tokens left, liveness and pages stay on the device from one Decode
    to the next, which brings new pages only. ``source`` says where each row comes from: the index of its row
    in the previous Decode (within the same data shard), or -1 for a row that starts here with ``tokens``,
    ``positions``, ``remaining``. A dead row has ``remaining`` 0. A row dies on the device when it draws one
    of its ``stop_tokens`` or has no tokens left; it replies token -1 after that.
    With ``top`` the reply has ``top_tokens`` and ``top_logprobs`` [K, B, top], as in a Prefill, from the
    same distribution as ``logprobs``. For a mixture of experts it has ``experts`` [K, B, L, k], those of each
    step's input token.
    """

    steps: int
    source: np.ndarray  # int32 [B], index local to the data shard
    tokens: np.ndarray  # int32 [B]: the last known token, whose keys and values are not yet written
    positions: np.ndarray  # int32 [B]: position of that token
    remaining: np.ndarray  # int32 [B]: tokens still to draw; 0 for an empty row
    slots: np.ndarray  # int32 [B]: bank slot
    seeds: np.ndarray  # uint32 [B, 2]
    temperatures: np.ndarray  # float32 [B]; 0 is greedy
    top_k: np.ndarray  # int32 [B]; the vocabulary size disables it
    top_p: np.ndarray  # float32 [B]; 1 disables it
    stop_tokens: np.ndarray  # int32 [B, STOP_TOKENS]; -1 is unused
    pages: np.ndarray  # int32 [M]: the pages that come to rows, row after row; then all have enough
    page_counts: np.ndarray  # int32 [B]: how many of them each row gets
    # int32 [B]: how many pages row ``source`` had before; 0 for a row that starts here
    page_places: np.ndarray
    top: int = 0  # how many of the likeliest tokens to reply for each step
    active: int = 0  # adapters that the program is for, one of ``active_sizes``; 0: the fewest that suffice
    block: int = 0  # rows of each data shard that the program takes at once; 0: all
    # int32 [B, most steps]: tokens that are known already, to be taken instead of drawn ones; -1: draw.
    # Present if the setup is ``batch_invariant``, and with ``masks``.
    forced: np.ndarray | None = None
    # uint32 [M, V / 32]: a bit for each token that a grammar allows. One that is not allowed is drawn again
    # among those that are; the reply's ``redrawn`` bool [K, B] says which. None: the program knows no masks.
    masks: np.ndarray | None = None
    # int32 [B, most steps]: which of them counts in a step; -1: none. A row has at most MASKS_OF_ROW.
    mask_places: np.ndarray | None = None
    # int32 [B]: slots of the rows' states, which every token changes. Present as in a Prefill. That of a
    # follower holds anything before and after: there the state after a draft stays until it counts. A ring
    # is that of all rows of its sequence.
    states: np.ndarray | None = None
    # int32 [B], 0 or less: added to positions for the rotation of rows with images before. None: of no row.
    shifts: np.ndarray | None = None
    # int32 [B]: how many rows before each row the one is whose sequence it follows; 0: it has its own. A
    # follower reads what is likely to come. It has the fields of the row that it follows, and brings no
    # pages. In every step its token comes behind those of the rows before it, or it is REJECTED.
    depths: np.ndarray | None = None
    # int32 [B, DRAFT_TOKENS], of rows that others follow: what is likely to come; -1: the end, where the
    # first follower reads what the model expects. A model that makes drafts replies ``drafts`` [K, B]: what
    # it expects behind each token. None: the program knows no followers.
    drafts: np.ndarray | None = None
    # What the steps read of prompts beside the rows. For a mixture of experts the reply has their
    # ``chunk_experts`` [K, D C / K, L, k]. None: nothing. Never with ``masks``, ``drafts``, ``states`` or a
    # ``block``.
    chunk: PromptChunk | None = None


# Threads of a worker that compile: what somebody waits for; what is not urgent, or is awaited by another
# session; and what nobody waits for, in a process of the lowest priority (Ready.compiles_aside). Others help
# with what is not urgent, where workers have several threads for that (Ready.compile_threads).
AWAITED, AHEAD, ASIDE, *HELPING = range(6)
COMPILE_LANES = 3 + len(HELPING)


class Compile(Command, frozen=True, tag="compile"):
    """Begins to compile a program while other commands run. The report Compiled says how it went.

    Lanes run side by side. Within a lane each process compiles one program after another, in the order of
    the commands, which is the same for all processes.
    """

    number: int  # of the order
    program: ProgramShape
    lane: int  # AWAITED, AHEAD, ASIDE, or one of HELPING
    is_last: bool = False  # no more are planned: memory that compiling has left behind may be freed
    is_hurried: bool = False  # commands use a worse program meanwhile: ASIDE does not stand back for them


class Shutdown(Command, frozen=True, tag="shutdown"):
    """Ends the worker with exit code 0."""


AnyCommand = (
    ForwardBackward
    | Forward
    | CustomLoss
    | OptimStep
    | DimuonStep
    | EncodeImages
    | Prefill
    | Decode
    | Compile
    | Move
    | Drop
    | Shutdown
)
