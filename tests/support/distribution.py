"""Deals files to the processes of `make test`: the longest first, and those that share to one process."""

from typing import Any

import pytest

# Files that use one server, or the same traced programs, which each process would make for itself.
TOGETHER = {
    "server": (
        "tests/sdk/test_guides.py",
        "tests/sdk/test_waiting_for_programs.py",  # before larger programs are there, which would do
        "tests/sdk/test_processes.py",
        "tests/sdk/test_trajectories.py",
        "tests/sdk/test_agents.py",
        "tests/sdk/test_bad_input.py",
        "tests/sdk/test_bad_requests.py",
        "tests/sdk/test_checkpoints.py",
        "tests/sdk/test_custom_losses.py",
        "tests/sdk/test_dimuon.py",
        "tests/sdk/test_downloads.py",
        "tests/sdk/test_grammars.py",
        "tests/sdk/test_losses.py",
        "tests/sdk/test_old_clients.py",
        "tests/sdk/test_openai.py",
        "tests/sdk/test_prefix_cache.py",
        "tests/sdk/test_sampling.py",
        "tests/sdk/test_sampling_clients.py",
        "tests/sdk/test_sampling_scores.py",
        "tests/sdk/test_sessions.py",
        "tests/sdk/test_stable_reinforce.py",
        "tests/sdk/test_telemetry.py",
        "tests/sdk/test_train_command.py",
        "tests/sdk/test_training.py",
        "tests/sdk/test_uploads.py",
        "tests/sdk/test_images.py",
        "tests/sdk/test_full_parameters.py",
        "tests/conformance/test_conformance.py",  # last: it makes keys, and others have none
    ),
    "bystander": (
        "tests/fuzz/test_behind_the_door.py",
        "tests/fuzz/test_mutants.py",
        "tests/fuzz/test_requests_met_before.py",
    ),
    "towers": (
        "tests/models/vision/test_parity.py",
        "tests/models/vision/test_tower.py",
    ),
    "tiny engine": (
        "tests/models/test_against_reference.py",
        "tests/models/test_long_rows.py",
        "tests/models/test_losses_against_reference.py",
        "tests/sharding/test_collectives.py",
        "tests/worker/steps/test_adapters.py",
        "tests/worker/steps/test_dimuon.py",
        "tests/worker/steps/test_experts.py",
        "tests/worker/steps/test_optimizer.py",
        "tests/worker/steps/test_prompt_scores.py",
        "tests/worker/steps/test_remat.py",
        "tests/worker/steps/test_sample.py",
        "tests/worker/steps/test_swap.py",
        "tests/worker/test_company_quickly.py",
        "tests/worker/test_split.py",
    ),
    "bits of training": (
        "tests/worker/test_company.py",
        "tests/worker/test_split_weights.py",
    ),
}
GROUP_OF = {file: name for name, files in TOGETHER.items() for file in files}

# One that starts last runs alone at the end, on one core.
LONG = (
    *GROUP_OF,
    "tests/worker/programs/test_aside.py",
    "tests/chaos/test_crashes.py",
    "tests/sdk/test_three_groups.py",
    "tests/worker/test_engine.py",
    "tests/coordinator/server/test_serve.py",
    "tests/sdk/test_warm_up.py",
    "tests/sdk/test_batch_invariance.py",
    "tests/worker/test_tenants.py",
    "tests/worker/test_batch_invariance.py",
)
PLACES = {file: place for place, file in enumerate(LONG)}
SHORT = "tests/coordinator/"  # many files without programs, which end together behind all others


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(file_of(item.nodeid)))


def _place(file: str) -> int:
    return PLACES.get(file, len(PLACES) + file.startswith(SHORT))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        """Treats files that share as one, and goes on behind a process that has crashed."""

        def _split_scope(self, nodeid: str) -> str:
            file = file_of(nodeid)
            return GROUP_OF.get(file, file)

        def remove_node(self, node: Any) -> str | None:
            """Return the test at which the process has crashed, if it has; nobody runs it again."""
            crashed, left = None, {}
            for scope, unit in self.assigned_work[node].items():
                for test, is_complete in unit.items():
                    if crashed is None and not is_complete:
                        crashed, unit[test] = test, True
                if not all(unit.values()):
                    left[scope] = unit
            self.assigned_work[node] = left  # a process that gets nothing of a file would wait for ever
            super().remove_node(node)
            return crashed

        def schedule(self) -> None:
            """Say to a process that comes last that there are no more tests, or it keeps one back."""
            super().schedule()
            super().schedule()

    return Scheduling(config, log)
