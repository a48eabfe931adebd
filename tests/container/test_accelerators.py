"""The images for GPUs and TPUs, as far as they go without one; while they are built they need 25 GB."""

import pytest
import tinker

from tests.container.rootless import User
from tests.container.servers import MODEL, new_key, served, with_model
from tests.sdk.examples import SECONDS, greedy, random_tokens, sample

pytestmark = [
    pytest.mark.container,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
# By extra: JAX's name of the platform, devices to plan for, and the package of its driver.
KINDS = {"tpu": ("tpu", "v5e:2x4", "libtpu"), "cuda12": ("cuda", "8xh100", "jax_cuda12_plugin")}


@pytest.mark.parametrize("extra", KINDS)
def test_an_image_for_accelerators_serves_on_cpus_and_says_what_is_missing(user: User, base, extra):
    platform, devices, plugin = KINDS[extra]
    with user.image(base, extra) as image, with_model(user, image) as volume:
        place = ["--rm", "-v", f"{volume}:/data"]
        assert user.podman("run", "--rm", image, "--version").startswith("spmd-tx ")
        planned = user.podman("run", *place, image, "plan", "--base-model", MODEL, "--devices", devices)
        assert planned.partition(",")[0].replace(" x ", "x") == f"{MODEL} on {devices}"

        serve = [image, "serve", "--base-model", MODEL]
        refused = user.ended("run", *place, "--env", f"JAX_PLATFORMS={platform}", *serve)
        assert refused.returncode != 0
        told = f"JAX_PLATFORMS is {platform}, and /dev shows no GPU or TPU ("
        assert told in refused.stderr
        assert "Traceback" not in refused.stdout + refused.stderr

        key = new_key(user, image, volume)
        for options, is_told in (("--env=JAX_PLATFORMS=cpu",), False), ((), True):
            with served(user, image, volume, *options) as (name, url):
                service = tinker.ServiceClient(base_url=url, api_key=key)
                sampler = service.create_sampling_client(base_model=MODEL).result(SECONDS)
                assert len(sample(sampler, random_tokens(10, seed=0), greedy()).tokens) == 8
                told = f"{plugin} is installed, and /dev shows no device for it: computing on CPUs"
                log = user.ended("logs", name).stderr
                assert (told in log) is is_told
