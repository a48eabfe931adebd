"""Mixers of the common kind: softmax attention with grouped queries."""

from dataclasses import dataclass

from spmd_tx.models.declared.layers import Attended, LayerArray
from spmd_tx.models.declared.maps import Map, Parameter, TensorSource, linear, norm_of
from spmd_tx.models.declared.rope import Rope


@dataclass(frozen=True)
class Softmax:
    """Declares attention with grouped queries (Vaswani et al. 2017, Ainslie et al. 2023)."""

    heads: int
    kv_heads: int
    width: int  # of a head
    rope: Rope | None  # None: no positions
    eps: float  # of the norms of queries and keys
    qk_norm: bool = False  # of each head, before positions
    window: int = 0  # tokens that a token sees, itself among them; 0: all before it
    sinks: bool = False  # a learned logit of each head that takes part in the softmax and has no value
    gate: bool = False  # each head's output times a sigmoid, which q_proj gives beside the query
    biases: tuple[str, ...] = ()  # of "q", "k", "v", "o"
    is_zero_centred: bool = False  # the norms of queries and keys multiply by 1 + weight
    module: str = "self_attn"
    fused: str = ""  # the map that holds queries, keys and values one behind the other; "": there is none

    def arrays(self, d_model: int, at: str) -> tuple[LayerArray, ...]:
        module, queries = f"{at}{self.module}", self.heads * self.width
        keys, query_width = self.kv_heads * self.width, queries * (2 if self.gate else 1)
        begins = {"q": 0, "k": query_width, "v": query_width + keys}

        def map_of(name: str, width_in: int, width_out: int, **options: object) -> Map:
            known_as = f"{module}.{name}_proj"
            bias = TensorSource(f"{known_as}.bias") if name in self.biases else None
            source = linear(known_as)
            if self.fused and name in begins:
                source = linear(f"{module}.{self.fused}").part(begins[name], begins[name] + width_out)
            return Map(name, width_in, width_out, source, group="attn", bias=bias, module=known_as, **options)  # pyright: ignore[reportArgumentType]

        arrays: list[LayerArray] = [
            map_of("q", d_model, query_width, split="columns", heads=self.heads),
            map_of("k", d_model, keys, split="columns", heads=self.kv_heads),
            map_of("v", d_model, keys, split="columns", heads=self.kv_heads),
            map_of("o", queries, d_model, split="rows"),
        ]
        if self.qk_norm:
            arrays += [norm_of(name, self.width, f"{module}.{name}") for name in ("q_norm", "k_norm")]
        if self.sinks:
            arrays.append(Parameter("sinks", (self.heads,), TensorSource(f"{module}.sinks"), 0))
        return tuple(arrays)

    @property
    def pools(self) -> int:
        """How many arrays pages have; 0: the tokens of the window are kept in a slot."""
        return 0 if self.window else 2

    @property
    def attended(self) -> Attended:
        width = self.heads * self.width
        return Attended(width, width, self.window)
