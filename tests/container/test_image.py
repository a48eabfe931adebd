"""The image for CPUs, built and run by a user without privileges; a client trains with a server in it."""

import pytest
import tinker

from tests.container.rootless import User
from tests.container.servers import MODEL, new_key, served, with_model
from tests.sdk.examples import SECONDS, batch, greedy, logprobs_of, random_tokens, sample, train

pytestmark = [
    pytest.mark.container,
    pytest.mark.timeout(3600),
    # The SDK leaves a socket of each handshake to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROMPT = random_tokens(10, seed=0)


@pytest.fixture(scope="module")
def image(user: User, base):
    with user.image(base, extras="") as image:
        yield image


@pytest.fixture
def volume(user: User, image):
    with with_model(user, image) as volume:
        yield volume


def test_the_image_has_a_user_of_its_own(user, image):
    shell = ["run", "--rm", "--entrypoint", "sh", image, "-c"]
    told = user.podman(*shell, "id -u; id -g; stat -c '%u %a' /data; spmd-tx --version")
    assert told.splitlines()[:3] == ["1000", "1000", "1000 700"]
    (version,) = told.splitlines()[3:]
    assert version.startswith("spmd-tx ")


def test_a_run_is_found_again_on_the_volume_of_a_container_that_was_stopped(user, image, volume):
    key = new_key(user, image, volume)
    with served(user, image, volume) as (_, url):
        service = tinker.ServiceClient(base_url=url, api_key=key)
        trainer = service.create_lora_training_client(MODEL, rank=8).result(SECONDS)
        train(trainer, batch(seed=0))
        run, state = trainer.get_info().model_id, trainer.save_state("state").result(SECONDS).path
        sampled = trainer.save_weights_for_sampler("sampled").result(SECONDS).path
        sampler = service.create_sampling_client(model_path=sampled).result(SECONDS)
        tokens, logprobs = sample(sampler, PROMPT, greedy()).tokens, logprobs_of(trainer, batch(seed=1))
    with served(user, image, volume) as (_, url):
        service = tinker.ServiceClient(base_url=url, api_key=key)
        rest = tinker.RestClient(base_url=url, api_key=key)
        assert rest.get_training_run(run).result(SECONDS).training_run_id == run
        again = service.create_sampling_client(model_path=sampled).result(SECONDS)
        assert sample(again, PROMPT, greedy()).tokens == tokens
        resumed = service.create_training_client_from_state_with_optimizer(state).result(SECONDS)
        assert logprobs_of(resumed, batch(seed=1)).tolist() == logprobs.tolist()
        train(resumed, batch(seed=0))


def test_the_command_that_trains_is_in_the_image(user, image, volume):
    """The files of the model, with which the client makes tokens, are in the container alone."""
    key = new_key(user, image, volume)
    line = '{"prompt": "Where?", "completion": " Here."}'
    script = (
        f"echo '{line}' > /data/data.jsonl && spmd-tx train sl /data/data.jsonl --steps 3 --out /data/run"
    )
    with served(user, image, volume) as (name, _):
        said = user.podman("exec", "--env", f"TINKER_API_KEY={key}", name, "sh", "-c", script)
    assert "weights: tinker://" in said
