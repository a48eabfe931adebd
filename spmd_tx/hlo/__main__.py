"""Lists the operations of an optimized HLO module that cost most: python -m spmd_tx.hlo FILE [HOW_MANY]."""

import sys
from operator import itemgetter
from pathlib import Path

from spmd_tx.hlo.cost import cost_of


def main(path: str, most: int = 20) -> None:
    cost = cost_of(Path(path).read_text())
    print(
        f"{cost.flops / 1e12:.3f} TFLOP, {cost.bytes / 1e9:.2f} GB moved, {cost.launches:.0f} launches; "
        f"loops of unknown length: {', '.join(cost.unknown_loops) or 'none'}"
    )
    for title, unit, name in (("GB moved", 1e9, "bytes"), ("TFLOP", 1e12, "flops")):
        print(f"\nmost {title}")
        amounts = [(each.times * getattr(each, name), each) for each in cost.operations]
        for amount, each in sorted(amounts, key=itemgetter(0), reverse=True)[:most]:
            if amount:
                what = f"{each.op} {each.name}: {each.type[:80]}  {each.source[-70:]}"
                print(f"{amount / unit:10.3f}  {each.times:7.0f} x {what}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
