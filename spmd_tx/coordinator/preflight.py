"""What can be refused before anything is started: sizes that do not fit, and a port that is taken."""

import errno
import socket

from spmd_tx.config import ServerConfig
from spmd_tx.errors import StartError
from spmd_tx.models.config import ModelConfig

BACKLOG = 2048  # connections; a client opens hundreds at once


def check_mesh(config: ServerConfig, model: ModelConfig) -> None:
    """Refuse a mesh over which the model, or the processes, cannot be split evenly."""
    tp, fsdp = config.tensor_parallel_size, config.fully_sharded_data_parallel_size
    split = [
        ("tensor-parallel-size", tp, "attention heads", model.n_heads),
        ("tensor-parallel-size", tp, "entries of the vocabulary", model.vocab_size),
        ("tensor-parallel-size", tp, "feed-forward units", model.d_ff),
        ("fully-sharded-data-parallel-size", fsdp, "model dimensions", model.d_model),
    ]
    for option, ways, what, count in split:
        if count % ways:
            raise StartError(
                f"--{option} is {ways}, but the model's {count} {what} cannot be split {ways} ways"
            )
    if model.n_kv_heads % tp and tp % model.n_kv_heads:
        raise StartError(
            f"--tensor-parallel-size is {tp}, but it is neither a divisor nor a multiple of the model's "
            f"{model.n_kv_heads} key-value heads"
        )
    if config.mesh_size % config.num_processes:
        raise StartError(
            f"--num-processes is {config.num_processes}, but the mesh of {config.mesh_size} devices (the "
            "product of the three parallel sizes) cannot be split evenly among so many processes"
        )


def context_length(config: ServerConfig, model: ModelConfig) -> int:
    """The longest prompt with its answer, in tokens."""
    limit = model.max_positions
    wanted = limit if config.max_context_length is None else config.max_context_length
    if wanted > limit:
        raise StartError(
            f"--max-context-length is {wanted}, but the model has positions for {limit} tokens only"
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


def listen(host: str, port: int) -> socket.socket:
    """Take the port, so that a second server fails at once; 0 takes a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"port {port} of {host} is in use; end that program, or set another --port"
            ) from None
        raise StartError(f"cannot listen on {host}, port {port}: {error}; check --host and --port") from None


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.create_server((host, 0)) as taken:
        return taken.getsockname()[1]
