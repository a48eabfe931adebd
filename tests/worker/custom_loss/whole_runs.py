import numpy as np

from spmd_tx.worker.custom_loss.run import CustomLosses, LossResults


def run_all(losses: CustomLosses, definition: bytes, inputs: list[list[np.ndarray]]) -> LossResults:
    """Run a loss on every datum, in this process."""
    opened = losses.open(definition, inputs)
    results = LossResults(
        losses_D=np.zeros(len(inputs)),
        metrics_DM=np.zeros((len(inputs), len(opened.loss.metrics))),
        gradients=[np.zeros(0)] * len(inputs),
    )
    for piece in opened.pieces:
        of_piece = opened.run(piece)
        results.losses_D[piece.datums] = of_piece.losses_D
        results.metrics_DM[piece.datums] = of_piece.metrics_DM
        for datum, gradient in zip(piece.datums, of_piece.gradients, strict=True):
            results.gradients[datum] = gradient
    return results
