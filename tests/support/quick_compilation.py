"""How tests compile that need no server's bits: without optimizations, in a quarter of the time on CPUs.

The numbers differ from those of a server in their last bits.
"""

from jaxlib.version import __version_info__

# What takes longest where XLA does not optimize. Some arg-maxima of custom losses come out wrong with them.
# Newer XLA ends a process that names the emitters of fusions, which it always uses.
HAS_OTHER_EMITTERS = __version_info__ < (0, 11, 1)
# One module of LLVM takes less time than the many that several cores can compile at once.
XLA_OPTIONS = {"xla_cpu_prefer_vector_width": 128, "xla_cpu_parallel_codegen_split_count": 1} | (
    {"xla_cpu_use_fusion_emitters": False} if HAS_OTHER_EMITTERS else {}
)
ENVIRONMENT = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": " ".join(f"--{name}={str(value).lower()}" for name, value in XLA_OPTIONS.items()),
}
