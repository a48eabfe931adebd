"""The layer that predicts one token more (MTP, DeepSeek-AI 2024, section 2.2), whose tokens are drafts."""

from dataclasses import dataclass

from spmd_tx.models.declared.layers import Layer, LayerArray
from spmd_tx.models.declared.maps import Map, linear, norm_of

JOINS = "eh_proj"  # the map of two vectors to the layer's input, which no checkpoint encodes


@dataclass(frozen=True)
class MtpLayer(Layer):
    """Declares a layer whose input is joined of a token's last hidden state and the next token's embedding.

    Embedding and vocabulary head are the model's. Names of modules are whole.
    """

    at: str = ""  # how the names of the other tensors begin; there is one such layer
    of_embedding: str = ""  # the norm of the embedding,
    of_hidden: str = ""  # of the hidden state,
    joins: str = ""  # the map of both, the embedding first,
    final: str = ""  # and the norm before the vocabulary head
    copies: tuple[str, ...] = ()  # regular expressions: copies of the embedding and of the head

    def arrays(self, d_model: int, at: str) -> tuple[LayerArray, ...]:
        """Return all arrays, those of the layer itself behind those that make its input."""
        return (
            norm_of("embedding_norm", d_model, self.of_embedding),
            norm_of("hidden_norm", d_model, self.of_hidden),
            Map(JOINS, 2 * d_model, d_model, linear(self.joins), "rows"),
            *super().arrays(d_model, self.at),
            norm_of("final_norm", d_model, self.final),
        )
