"""Channels: gated feed-forward blocks and mixtures of experts."""

from dataclasses import dataclass
from typing import Literal

from spmd_tx.models.declared.layers import LayerArray
from spmd_tx.models.declared.maps import Map, Parameter, TensorSource, linear
from spmd_tx.models.declared.route import Route

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
ALL_EXPERTS = "experts.{expert}."


@dataclass(frozen=True)
class Glu:
    """Declares a gated feed-forward block: down(act(gate(x)) · up(x)) (Shazeer 2020)."""

    width: int
    activation: Activation = "silu"
    module: str = "mlp"
    prefix: str = ""  # of the names of its arrays: "shared_" for the shared expert of a mixture
    has_bias: bool = False
    fused: str = ""  # the map that holds gate and up one behind the other; "": there is none

    def arrays(self, d_model: int, at: str) -> tuple[LayerArray, ...]:
        def map_of(name: str, width_in: int, width_out: int, split: Literal["columns", "rows"]) -> Map:
            module = f"{at}{self.module}.{name}_proj"
            bias = TensorSource(f"{module}.bias") if self.has_bias else None
            source = linear(module)
            if self.fused and split == "columns":
                begin = self.width if name == "up" else 0
                source = linear(f"{at}{self.module}.{self.fused}").part(begin, begin + self.width)
            return Map(
                self.prefix + name, width_in, width_out, source, split, "mlp", bias=bias, module=module
            )

        return (
            map_of("gate", d_model, self.width, "columns"),
            map_of("up", d_model, self.width, "columns"),
            map_of("down", self.width, d_model, "rows"),
        )


@dataclass(frozen=True)
class ExpertSources:
    """Says where a checkpoint has the matrices of all experts."""

    gate: TensorSource
    up: TensorSource
    down: TensorSource
    gate_bias: TensorSource | None = None
    up_bias: TensorSource | None = None
    down_bias: TensorSource | None = None


def separate_experts(module: str) -> ExpertSources:
    """Return the sources of experts that are modules of their own, as in Qwen3-MoE and DeepSeek-V3."""
    return ExpertSources(*(linear(f"{module}.{ALL_EXPERTS}{name}_proj") for name in ("gate", "up", "down")))


@dataclass(frozen=True)
class Mixture:
    """Declares a mixture of experts, each a gated feed-forward block."""

    experts: int
    chosen: int  # experts of a token
    width: int  # of an expert
    route: Route
    activation: Activation = "silu"
    shared: Glu | None = None  # runs for all tokens besides
    shared_gate: TensorSource | None = None  # [1, D]: the shared expert's output is times its sigmoid
    sources: ExpertSources | None = None  # None: modules of their own
    module: str = "mlp"
    router: str = "gate"
    router_bias: TensorSource | None = None
    correction: TensorSource | None = None  # [experts]: added to scores when experts are chosen

    def arrays(self, d_model: int, at: str) -> tuple[LayerArray, ...]:
        module = f"{at}{self.module}"
        sources = self.sources or separate_experts(module)

        def map_of(
            name: str,
            widths: tuple[int, int],
            source: TensorSource,
            bias: TensorSource | None,
            split: Literal["columns", "rows"],
        ) -> Map:
            adapters = f"{module}.{ALL_EXPERTS}{name}_proj" if source.stacked else ""
            many = {"experts": self.experts, "chosen": self.chosen}
            return Map(name, *widths, source, split, "mlp", **many, bias=bias, module=adapters)

        arrays: list[LayerArray] = [
            map_of("gate", (d_model, self.width), sources.gate, sources.gate_bias, "columns"),
            map_of("up", (d_model, self.width), sources.up, sources.up_bias, "columns"),
            map_of("down", (self.width, d_model), sources.down, sources.down_bias, "rows"),
            Map(
                "router",
                d_model,
                self.experts,
                linear(f"{module}.{self.router}"),
                bias=self.router_bias,
            ),
        ]
        if self.correction is not None:
            arrays.append(Parameter("correction", (self.experts,), self.correction, is_fp32=True))
        if self.shared is not None:
            arrays += self.shared.arrays(d_model, at)
        if self.shared_gate is not None:
            arrays.append(Map("shared_expert_gate", d_model, 1, self.shared_gate))
        return tuple(arrays)
