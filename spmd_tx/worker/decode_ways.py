"""Ways in which GPUs may run a decode, as XLA's options for the program. Workers try them when they start."""

from collections.abc import Mapping

# Whole loops become CUDA graphs, so that neither launches nor the condition of a loop wait for the host.
GRAPHS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE,CONDITIONAL,COLLECTIVES"
    )
}
# A small sum over tensor parallelism is one kernel that reads the other devices' memory.
ONE_SHOT = {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True}

PLAIN = "plain"
WAYS: dict[str, Mapping[str, bool | str]] = {
    "graphs and one-shot": GRAPHS | ONE_SHOT,
    "graphs": GRAPHS,
    "one-shot": ONE_SHOT,
    PLAIN: {},
}


def ways_for(tp: int, processes: int) -> list[str]:
    """Return the ways to try, the fastest first.

    Between processes a graph would need the same choice everywhere, and the kernel the others' memory.
    """
    if processes > 1:
        return [PLAIN]
    return [name for name in WAYS if tp > 1 or "one-shot" not in name]


def options_of(way: str) -> dict[str, bool | str]:
    """Return XLA's options for a way."""
    return dict(WAYS[way])
