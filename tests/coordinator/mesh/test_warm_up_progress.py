from spmd_tx.coordinator.mesh.warm_up_progress import CompileProgress
from spmd_tx.coordinator.runtime.mesh_record import MenuProgress, MeshTimeline
from spmd_tx.coordinator.runtime.metrics import REGISTRY
from spmd_tx.protocol.programs import CompileCount, CompileReport


def compiles(source, unit=""):
    labels = {"program": "decode", "source": source, "group": "main"}
    return REGISTRY.get_sample_value(f"spmd_tx_compile{unit}_total", labels) or 0


def report(count, **more):
    counts = [
        CompileCount(program="decode", source="compiler", count=count, seconds=2.0 * count),
        CompileCount(program="decode", source="cache", count=1, seconds=0.5),
    ]
    return CompileReport(counts=counts, **more)


def test_what_workers_count_since_they_started_is_added_up_over_generations():
    progress = CompileProgress()
    before = compiles("compiler", "s"), compiles("cache", "s"), compiles("compiler", "_seconds")
    for generation in ([1, 3], [2]):
        progress.begin()
        for count in generation:
            progress.take(report(count))
    after = compiles("compiler", "s"), compiles("cache", "s"), compiles("compiler", "_seconds")
    assert [new - old for new, old in zip(after, before, strict=True)] == [5, 2, 10]


def test_health_says_what_is_compiled_ahead_and_how_much_is_ready():
    record = MeshTimeline()
    progress = CompileProgress(record)
    assert record.menu is None
    progress.show(MenuProgress(3, 40, ("forward_backward 4x256", "decode 4x16x1")))
    assert record.menu == MenuProgress(3, 40, ("forward_backward 4x256", "decode 4x16x1"))
    progress.show(MenuProgress(40, 40))
    assert record.menu == MenuProgress(40, 40)
    progress.begin()
    assert record.menu is None


def test_what_commands_had_to_wait_for_is_counted():
    def unforeseen():
        return REGISTRY.get_sample_value("spmd_tx_unforeseen_compiles_total", {"group": "main"})

    progress, before = CompileProgress(), unforeseen()
    for count in (1, 1, 3):
        progress.take(CompileReport(unforeseen=count))
    assert unforeseen() == before + 3
