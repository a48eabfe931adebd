"""The command ``spmd-tx``, also as ``python -m spmd_tx.cli``: Ctrl-C ends it even while it is imported."""

from spmd_tx.processes.interrupts import ended_by_interrupts, leave_to_kernel


def run() -> None:
    with ended_by_interrupts():
        from spmd_tx.cli.main import main
    try:
        main()
    finally:
        leave_to_kernel()


if __name__ == "__main__":
    run()
