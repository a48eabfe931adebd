"""Measures what a model's own layer for drafts (MTP) costs while it is not trained, so that it is of no use.

    python -m tools.bench.mtp [--rounds N] [CASE ...]

The model is a tiny GLM-4.5. Rounds by an engine without the layer and by one with ``--speculation mtp`` take
turns, as in tools/bench/speculation.py.
"""

import argparse
import tempfile
from pathlib import Path

from tests.support.mtp_models import write_to_be_trained
from tools.bench.sampling import CONTEXT
from tools.bench.speculation import Case, measure, started

CASES = {
    "untrained, single": Case((256,), None),
    "untrained, four": Case((128,) * 4, None),
    "untrained, sixteen": Case((128,) * 16, None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_to_be_trained(Path(folder), "glm4_moe", max_position_embeddings=CONTEXT))
        plain, ahead = started(model_dir=model), started(model_dir=model, speculation="mtp")
    for name in options.cases or CASES:
        measure(name, CASES[name], plain, ahead, options.rounds)


if __name__ == "__main__":
    main()
