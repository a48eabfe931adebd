"""Makes the moves of each name, and finds commands by name or type."""

from spmd_tx.protocol.commands import AdapterSpec, Move
from spmd_tx.protocol.places import BankSlot, Fresh, Idle, StateFolder, TrainSlot, WeightsFolder

ADAPTER = AdapterSpec(rank=4)


def is_one_of(command, kinds):
    """Whether a command has one of these names or types; one alone need not be in a tuple."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return any(command.name == kind if isinstance(kind, str) else isinstance(command, kind) for kind in kinds)


def refusal_of(command, refused):
    """Return what workers say to a command that loads one of these folders; None: it is carried out."""
    source = command.source if isinstance(command, Move) else None
    if isinstance(source, StateFolder | WeightsFolder) and source.path in refused:
        return f"{source.path} is of another base model"
    return None


def create_adapter(slot=0, seed=0, adapter=ADAPTER):
    return Move(source=Fresh(seed), target=TrainSlot(slot), adapter=adapter)


def save_state(slot, path, adapter=ADAPTER):
    return Move(source=TrainSlot(slot), target=StateFolder(str(path)), adapter=adapter)


def snapshot(slot, path, adapter=ADAPTER):
    return Move(source=TrainSlot(slot), target=StateFolder(str(path)), adapter=adapter, in_background=True)


def load_state(slot, path, adapter=ADAPTER, *, optimizer):
    source = StateFolder(str(path))
    return Move(source=source, target=TrainSlot(slot), adapter=adapter, with_optimizer=optimizer)


def swap_out(slot, name):
    return Move(source=TrainSlot(slot), target=Idle(name))


def swap_in(slot, name):
    return Move(source=Idle(name), target=TrainSlot(slot))


def save_sampler(slot, bank, adapter=ADAPTER, path=None):
    """Into the bank, and into a folder if there is a path; into the folder alone if ``bank`` is None."""
    if bank is None:
        return Move(source=TrainSlot(slot), target=WeightsFolder(str(path)), adapter=adapter)
    folder = None if path is None else WeightsFolder(str(path))
    return Move(source=TrainSlot(slot), target=BankSlot(bank), adapter=adapter, also=folder)


def write_sampler(bank, path, adapter=ADAPTER):
    return Move(source=BankSlot(bank), target=WeightsFolder(str(path)), adapter=adapter)


def load_sampler(bank, path, adapter=ADAPTER):
    return Move(source=WeightsFolder(str(path)), target=BankSlot(bank), adapter=adapter)


def page_out(bank, name):
    return Move(source=BankSlot(bank), target=Idle(name))


def page_in(bank, name, adapter=ADAPTER):
    return Move(source=Idle(name), target=BankSlot(bank), adapter=adapter)
