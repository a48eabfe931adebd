"""The options of groups beside the main one: which they have, and how they are written."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from spmd_tx.config import OPTIONS, ServerConfig
from spmd_tx.errors import StartError
from spmd_tx.group_names import MAIN, REPLICA, is_replica
from spmd_tx.options import flag

# Options of which each group has its own value, or the default
OWN = (
    *("base_model", "revision", "served_model_name", "role", "max_context_length"),
    *("expert_weights", "base_dtype", "expert_lora", "full_parameters"),
    *("fully_sharded_data_parallel_size", "expert_parallel_size", "tensor_parallel_size"),
    *("shard_base_weights", "num_processes", "local_processes", "worker_devices"),
    "jax_port",
    *("kv_cache_tokens", "state_cache", "image_tokens"),
)
# Options of which a group has the server's value, unless it is given one
INHERITED = (
    *("dtype", "max_lora_adapters", "max_lora_rank", "snapshot_seconds", "command_timeout"),
    *("warm_up", "train_tokens", "sampler_slots", "decode_rows", "decode_steps", "page_size", "speculation"),
    "batch_invariant",
)
# Options in which the groups of one base model agree
OF_BASE = (
    *("revision", "served_model_name", "max_context_length", "expert_weights", "base_dtype", "expert_lora"),
    *("full_parameters", "dtype", "max_lora_rank", "batch_invariant", "image_tokens"),
)
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}")  # of a group: it names a folder, and a label of metrics
KEYS = ("name", *OWN, *INHERITED, "replicas")
MOST_REPLICAS = 256  # of a group


def read_pairs(text: str) -> dict[str, str]:
    """Read what ``--group`` is given: "name=teacher,base_model=...". Raises StartError.

    A part without a key belongs to the value before it, as in lists of names.
    """
    values = dict[str, str]()
    name = None
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            name = key.strip()
            values[name] = value.strip()
        elif name is not None:
            values[name] += f",{part}"
        else:
            raise StartError(f"--group {text} has no key; write it as name=NAME,base_model=MODEL")
    return values


def as_pairs(values: Mapping[str, object]) -> str:
    """Write the values of a group of a TOML file as ``--group`` has them."""
    texts = {
        key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()
    }
    return ",".join(f"{key}={text}" for key, text in texts.items())


def with_groups(config: ServerConfig, groups: Iterable[Mapping[str, Any]]) -> ServerConfig:
    """Return the options of the server with those of groups beside the main one. Raises StartError."""
    declared = [config]
    made = [config]
    for values in groups:
        declared.append(_made(made, values))
        made += _replicas(declared[-1], values)
    _check(declared)
    main, *others = (msgspec.structs.replace(group, processes_beside=_beside(group, made)) for group in made)
    return msgspec.structs.replace(main, groups=tuple(others))


def _replicas(group: ServerConfig, values: Mapping[str, Any]) -> Sequence[ServerConfig]:
    """Make the groups of one that is declared with ``replicas``, or return it alone. Raises StartError."""
    if "replicas" not in values:
        return [group]
    count = _converted(group.group, "replicas", values["replicas"], int)
    if not 1 <= count <= MOST_REPLICAS:
        raise StartError(f"group {group.group} sets replicas to {count}; set it from 1 to {MOST_REPLICAS}")
    if group.trains:
        raise StartError(f"group {group.group} has replicas and trains; give it role = sample")
    if group.local_processes:
        raise StartError(
            f"group {group.group} has replicas and local_processes, and replicas join with spmd-tx worker; "
            "leave one of the two out"
        )
    return [
        msgspec.structs.replace(group, group=f"{group.group}{REPLICA}{number}", local_processes=0)
        for number in range(count)
    ]


def _beside(group: ServerConfig, groups: Iterable[ServerConfig]) -> tuple[int, ...]:
    """Return the workers of other groups that may share a host's memory; replicas have hosts of their own."""
    if is_replica(group.group):
        return ()
    return tuple(each.num_processes for each in groups if each is not group and not is_replica(each.group))


def _made(groups: Sequence[ServerConfig], values: Mapping[str, Any]) -> ServerConfig:
    """Make the options of one group: those of the server are its own, too. ``groups`` are those before it."""
    config, name = groups[0], values.get("name")
    if not isinstance(name, str) or name == MAIN or not NAME.fullmatch(name):
        raise StartError(
            f"a group has the name {name!r}; give each a name of its own, of small letters, digits, _ and -, "
            f"other than {MAIN}"
        )
    unknown = sorted(values.keys() - set(KEYS))
    if unknown:
        raise StartError(f"group {name} sets {', '.join(unknown)}; a group has {', '.join(KEYS)}")
    given = {
        key: _converted(name, key, value, OPTIONS[key].type)
        for key, value in values.items()
        if key not in ("name", "replicas")
    }
    fields = {field.name: field for field in msgspec.structs.fields(ServerConfig)}
    defaults = {key: fields[key].default for key in OWN if key != "base_model"}
    first = _of_same_base(groups, given)
    if first is not None:
        defaults |= {key: getattr(first, key) for key in OF_BASE}
        _check_agreement(name, given, first)
    try:
        return msgspec.structs.replace(config, **{**defaults, **given}, group=name, groups=())
    except StartError as error:
        raise StartError(f"group {name}: {error}") from None


def _of_same_base(groups: Iterable[ServerConfig], given: Mapping[str, Any]) -> ServerConfig | None:
    """Return the first group with the base model of another one, which may have a name of its own for it."""
    for group in groups:
        names = given.get("served_model_name", group.served_model_name)
        if given.get("base_model", group.base_model) == group.base_model and names == group.served_model_name:
            return group
    return None


def _check_agreement(name: str, given: Mapping[str, Any], first: ServerConfig) -> None:
    """Raise StartError if a group says something else of its base model than the first one."""
    for key in OF_BASE:
        value, others = given.get(key, getattr(first, key)), getattr(first, key)
        if value != others:
            raise StartError(
                f"{key} of {name} is {value}, and of {first.group} {others}; groups of one base model must "
                "agree"
            )


def _converted(group: str, key: str, value: Any, kind: Any) -> Any:
    """Read the value of an option: a text, or what a TOML file has."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        where = f"{flag(key)} of spmd-tx serve --help" if key in OPTIONS else "docs/groups.md"
        raise StartError(f"group {group} sets {key} to {value!r}; see {where} for its values") from None


def _check(groups: Collection[ServerConfig]) -> None:
    """Raise StartError if two groups have one name, or train one base model, or two have one name."""
    names = [group.group for group in groups]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise StartError(f"two groups are called {twice}; give each a name of its own")
    bases = dict[str, ServerConfig]()
    for group in groups:
        for name in group.model_names:
            first = bases.setdefault(name, group)
            is_same = (first.base_model, first.model_names) == (group.base_model, group.model_names)
            if not is_same:
                raise StartError(
                    f"groups {first.group} and {group.group} both serve {name}, and not the same base_model "
                    "under the same names; change the served_model_name of one if it is another model"
                )
    trained = dict[str, str]()
    for group in groups:
        if group.trains and trained.setdefault(group.model_name, group.group) != group.group:
            raise StartError(
                f"groups {trained[group.model_name]} and {group.group} both train {group.model_name}; a base "
                "model has one training group: give one role = sample"
            )
