from spmd_tx.coordinator.compile_progress import CompileProgress, ProgramsHealth
from spmd_tx.coordinator.metrics import REGISTRY
from spmd_tx.programs_protocol import CompileCount, CompileReport


def compiles(source, unit=""):
    labels = {"program": "decode", "source": source}
    return REGISTRY.get_sample_value(f"spmd_tx_compile{unit}_total", labels) or 0


def report(count, **more):
    counts = [
        CompileCount(program="decode", is_cached=False, count=count, seconds=2.0 * count),
        CompileCount(program="decode", is_cached=True, count=1, seconds=0.5),
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
    progress = CompileProgress()
    assert progress.health is None
    progress.take(report(1, ready=3, planned=40, ahead="forward_backward 4x256"))
    assert progress.health == ProgramsHealth(3, 40, "forward_backward 4x256")
    progress.take(report(1, ready=40, planned=40))
    assert progress.health == ProgramsHealth(40, 40)
    progress.begin()
    assert progress.health is None
