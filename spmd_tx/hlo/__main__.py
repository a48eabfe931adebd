"""Lists the operations of an optimized HLO module that cost most: python -m spmd_tx.hlo FILE [HOW_MANY]."""

import sys
from pathlib import Path

from spmd_tx.hlo.cost import DeviceOperation, cost_of


def main(path: str, most: int = 20) -> None:
    cost = cost_of(Path(path).read_text())
    print(
        f"{cost.flops / 1e12:.3f} TFLOP, {cost.bytes / 1e9:.2f} GB moved, {cost.launches:.0f} launches; "
        f"loops of unknown length: {', '.join(cost.unknown_loops) or 'none'}"
    )
    for title, unit, amount in (("GB moved", 1e9, _bytes), ("TFLOP", 1e12, _flops)):
        print(f"\nmost {title}")
        for each in sorted(cost.operations, key=amount, reverse=True)[:most]:
            if amount(each):
                what = f"{each.op} {each.name}: {each.type[:80]}  {each.source[-70:]}"
                print(f"{amount(each) / unit:10.3f}  {each.times:7.0f} x {what}")


def _bytes(each: DeviceOperation) -> float:
    return each.times * each.bytes


def _flops(each: DeviceOperation) -> float:
    return each.times * each.flops


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
