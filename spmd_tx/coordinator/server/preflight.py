"""Refuses what cannot work before anything is started: sizes that do not fit, and a port that is taken."""

import errno
import ipaddress
import re
import socket
from fnmatch import fnmatchcase

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.training.packing import SMALL_ROW
from spmd_tx.errors import StartError
from spmd_tx.models.declared.model import Model
from spmd_tx.options import AUTO
from spmd_tx.protocol.addresses import is_loopback
from spmd_tx.protocol.secret import REMEDY

URL_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")  # as the first part of the path that a URL is taken for
MAKE_KEY = "make the first one with: spmd-tx keys create (docs/keys.md)"
GIVE_SECRET = f"give all of them the same --secret-file ({REMEDY})"

MOST_PROCESSES = 128  # workers on this host: each takes an agent here, with its connection
BACKLOG = 2048  # connections; a client opens hundreds at once


def check_mesh(config: ServerConfig, model: Model) -> None:
    """Refuse a mesh over which the model, or the processes, cannot be split evenly, as far as it is known."""
    fsdp, ep, tp = (1 if size == AUTO else size for size in config.parallel_sizes)
    split = [
        ("attention heads", model.n_heads),
        ("heads of keys of linear attention", model.linear_heads),
        ("vocabulary entries", model.vocab_size),
        *(("feed-forward units", width) for width in model.inner_widths),
        ("tokens of the shortest row", SMALL_ROW),
    ]
    for what, count in split:
        if count % tp:
            raise StartError(
                f"--tensor-parallel-size is {tp}, but {count} {what} cannot be split {tp} ways; "
                f"set it to a number that divides {count}"
            )
    if model.n_kv_heads % tp and tp % model.n_kv_heads:
        raise StartError(
            f"--tensor-parallel-size is {tp}, but it neither divides nor is a multiple of the "
            f"model's {model.n_kv_heads} key-value heads; change it so that it does"
        )
    for width in model.outer_widths:
        if (config.shard_base_weights == "yes" or config.full_parameters) and width % fsdp:
            why = "--full-parameters is set" if config.full_parameters else "--shard-base-weights is yes"
            raise StartError(
                f"{why} and --fully-sharded-data-parallel-size is {fsdp}, but the model has matrices whose "
                f"width {width} cannot be split {fsdp} ways; set the size to a number that divides it"
            )
    if model.n_experts % ep:
        raise StartError(
            f"--expert-parallel-size is {ep}, but {model.n_experts} experts cannot be split {ep} ways; "
            f"set it to a number that divides {model.n_experts}"
        )
    _check_packed(config, model)
    devices = config.worker_devices
    if config.mesh is not None and devices and config.mesh_size != devices * config.num_processes:
        raise StartError(
            f"--worker-devices is {devices}, but the mesh of {config.mesh_size} devices (the product of the "
            f"three parallel sizes) gives {config.num_processes} processes another number; leave it out, or "
            "change the sizes"
        )
    if config.mesh is not None and config.mesh_size % config.num_processes:
        raise StartError(
            f"--num-processes is {config.num_processes}, but the mesh of {config.mesh_size} devices (the "
            "product of the three parallel sizes) cannot be split evenly; set it to a number that divides it"
        )


def _check_packed(config: ServerConfig, model: Model) -> None:
    """Refuse to cut groups of numbers that share a scale."""
    fsdp, _, tp = (1 if size == AUTO else size for size in config.parallel_sizes)
    for array in model.packed:
        what, remedy = "packed experts have", "--expert-weights to unpacked"
        if config.base_dtype != AUTO and not (array.experts and model.packs_experts):
            what, remedy = f"matrices in {config.base_dtype} or fewer bits have", "--base-dtype to auto"
        groups = array.width_in // array.kept.group
        if array.split == "rows" and groups % tp:
            raise StartError(
                f"--tensor-parallel-size is {tp}, but {what} {groups} groups of numbers with a scale, which "
                f"cannot be split {tp} ways; set it to a number that divides {groups}"
                + (" and use --expert-parallel-size instead" if array.experts else "")
                + f", or set {remedy}"
            )
        if array.split == "columns" and config.shard_base_weights == "yes" and groups % fsdp:
            raise StartError(
                f"--shard-base-weights is yes and --fully-sharded-data-parallel-size is {fsdp}, but {what} "
                f"{groups} groups of numbers with a scale, which cannot be split {fsdp} ways; set the size "
                f"to a number that divides {groups}, or {remedy}"
            )


def check_sight(config: ServerConfig, model: Model) -> None:
    """Raise StartError if the model cannot take images, and the options ask for it."""
    if config.image_tokens in (0, AUTO):
        return
    asked = f"--image-tokens is {config.image_tokens}"
    if model.tower is None:
        raise StartError(f"{asked}, but {config.base_model} has no vision tower; leave the option out")


def check_folders(config: ServerConfig) -> None:
    """Refuse URLs, and folders where no training state can be saved: Orbax takes their paths for patterns."""
    if any(map(URL_SCHEME.fullmatch, config.data_dir.parts)) and not config.data_dir.exists():
        raise StartError(
            f"--data-dir is {str(config.data_dir)!r}, which looks like a URL; it must be a directory that "
            "all hosts see, and --checkpoints-base may be the URL of an object store"
        )
    for option, folder in (("data-dir", config.data_dir), ("checkpoints-base", config.checkpoints_dir)):
        if "**" in str(folder) or not all(fnmatchcase(part, part) for part in folder.parts):
            raise StartError(
                f"--{option} is {str(folder)!r}, which Orbax takes for a pattern, so that no training state "
                "could be saved there; name a folder without brackets and asterisks in its path"
            )


def check_hosts(config: ServerConfig, secret: str | None) -> None:
    """Refuse workers on other hosts without a secret that they can know."""
    for group in config.all_groups:
        of_group = "" if group is config else f" of group {group.group}"
        if group.agents_here > group.num_processes:
            raise StartError(
                f"--local-processes{of_group} is {group.agents_here}, but --num-processes is "
                f"{group.num_processes}; lower the first or raise the second"
            )
        if secret is None and group.agents_here < group.num_processes:
            raise StartError(
                f"--local-processes{of_group} is {group.agents_here} of {group.num_processes}, so workers "
                f"join from elsewhere, without a shared secret; {GIVE_SECRET}"
            )
    if config.agents_here > MOST_PROCESSES:
        raise StartError(
            f"{config.agents_here} worker processes are to start on this host, and {MOST_PROCESSES} at most "
            "can; lower --num-processes, or give --local-processes, so that others join from other hosts"
        )
    if secret is None and not is_loopback(config.worker_host):
        raise StartError(
            f"--worker-host {config.worker_host} lets other hosts connect, without a shared secret; "
            + GIVE_SECRET
        )


def check_keys(config: ServerConfig, address: str, is_open: bool) -> str | None:
    """Refuse to serve everyone on a network; return what is dangerous all the same, for the log.

    ``address`` is what the server listens on; the server is open when there have never been keys.
    """
    if not is_open:
        return None
    if ipaddress.ip_address(address).is_loopback:
        return f"there are no API keys: everyone on this machine has access; {MAKE_KEY}"
    if config.insecure_no_auth:
        return f"there are no API keys: everyone who can reach {config.host} has access; {MAKE_KEY}"
    raise StartError(
        f"--host {config.host} lets others connect, and there are no API keys; {MAKE_KEY}, or, to "
        "give everyone who can reach it access to everything, add --insecure-no-auth"
    )


def context_length(config: ServerConfig, model: Model) -> int:
    """The longest prompt with its answer, in tokens."""
    limit = model.max_positions
    wanted = limit if config.max_context_length is None else config.max_context_length
    if wanted > limit:
        raise StartError(
            f"--max-context-length is {wanted}, but the model has positions for {limit} tokens only; "
            f"set it to {limit} at most, or leave it out"
        )
    if 0 < config.kv_cache_tokens < wanted:
        raise StartError(
            f"--kv-cache-tokens is {config.kv_cache_tokens}, less than one sequence of {wanted} tokens; "
            "raise it, set it to 0, or lower --max-context-length"
        )
    return wanted


def check_pages(pages: int, page_size: int, max_context: int) -> None:
    """Refuse a cache that cannot hold one sequence; ``pages`` includes page 0, which holds nothing."""
    held = (pages - 1) * page_size
    if held < max_context:
        raise StartError(
            f"the key-value cache has room for {held} tokens per data shard, less than one sequence of "
            f"{max_context} tokens; lower --max-context-length, or give the model more memory or devices"
        )


def listen(host: str, port: int, open_files: int) -> socket.socket:
    """Take the port, so that a second server fails at once; 0 takes a free one.

    The backlog may be accepted at once, before connections are counted; it must leave files for others.
    """
    try:
        listening = _first_listening(host, port, backlog=min(BACKLOG, max(1, open_files // 8)))
        # asyncio does this only for sockets made with an explicit protocol. Without it the second packet
        # of an answer waits for the client's delayed acknowledgement: 40 ms for every request.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, UnicodeError) as error:  # of names that cannot be, too
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise StartError(
                f"port {port} of {host} is in use; end that program, or set another --port"
            ) from None
        raise StartError(f"cannot listen on {host}, port {port}: {error}; check --host and --port") from None


def _first_listening(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on the first address that a host stands for and this machine has. Raises OSError."""
    *others, last = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, place in others:
        try:
            return socket.create_server(place, family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(last[4], family=last[0], backlog=backlog)
