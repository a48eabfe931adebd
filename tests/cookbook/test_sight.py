"""recipes/vlm_classifier, unmodified, on pictures of coloured shapes; and renderers' chunks of any size."""

import json
import re

import pytest

from spmd_tx.demo import tiny_model
from tests.cookbook.conftest import ROWS, served
from tests.cookbook.cookbook import HERE, PYTHON, Cookbook, offline_environment, run_python

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1800)]

NAME = "Qwen/Qwen3.5-4B"  # of which the recipe knows how to render a conversation with images
SIZES = {"d_model": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ff": 384, "vocab_size": 512}
CHANCE = 1 / 8  # of as many classes


@pytest.fixture(scope="module")
def seeing(tmp_path_factory, pytestconfig):
    """The recipes, beside a server of a tiny model that sees, which takes images by default."""
    folder = tmp_path_factory.mktemp("sight")
    spec = tiny_model.Spec(family="qwen3_5", sees=True, max_positions=32768, **SIZES)
    given = {"model": str(tiny_model.write(folder / "model", spec)), "hub": str(folder / "hub"), "name": NAME}
    environment = offline_environment(folder / "hub")
    run_python(environment, [PYTHON, str(HERE / "teach_sight.py"), json.dumps(given)])
    with served(NAME, folder, environment) as server:
        environment |= {"TINKER_BASE_URL": server.url}
        yield Cookbook(server, environment, folder, pytestconfig.stash[ROWS])
        assert server.complaints() == []


def test_the_classifier_learns_to_name_what_it_sees(seeing):
    options = {"dataset": "pets", "n_eval": 64, "learning_rate": 0.005, "max_steps": 224, "eval_every": 64}
    options |= {"num_epochs": 7, "run_nll_evaluator": False}  # which counts images, too: it would be NaN
    run = seeing.run("vlm_classifier.train", experiment_dir=seeing.folder / "vlm", **options)
    (folder,) = (seeing.folder / "vlm").iterdir()
    trained = type(run)(folder, run.output)
    path = trained.checkpoints[-1]["sampler_path"]
    command = [
        PYTHON,
        "-m",
        "tinker_cookbook.recipes.vlm_classifier.eval",
        "dataset=pets",
        f"model_path={path}",
    ]
    evaluated = run_python(seeing.environment, [*command, "n_eval=64"])
    before, after = trained.values("accuracy")[0], float(re.findall(r"'accuracy': ([0-9.]+)", evaluated)[-1])
    seeing.report(f"accuracy {before:.2f} -> {after:.2f} of 64 pictures that were not trained on")
    assert before < CHANCE
    assert after >= 0.9


def test_the_chunks_of_200_random_images_are_taken(seeing):
    command = [PYTHON, str(HERE / "send_images.py"), NAME, "200"]
    assert run_python(seeing.environment, command).splitlines()[-1] == "200 taken"
