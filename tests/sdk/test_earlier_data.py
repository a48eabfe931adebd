"""A data directory that an earlier version was killed over goes on with this one, in the same numbers."""

import numpy as np
import pytest

from spmd_tx.demo import tiny_model
from tests.golden.earlier_data import KINDS, SPEC, WRITTEN, archive, go_on, restore, unpack
from tests.sdk.server import serving

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("kind", "database"), WRITTEN)
def test_runs_and_checkpoints_of_an_earlier_version_go_on(kind, database, tmp_path, postgres):
    model_dir = tiny_model.write(tmp_path / "model", SPEC)
    expected, options = unpack(archive(kind, database), tmp_path / "data"), dict(KINDS[kind])
    if database == "postgresql":
        options["database_url"] = restore(postgres, f"earlier_{kind}", tmp_path / "data")
    with serving(model_dir, tmp_path / "data", **options) as server:
        server.wait_until_ready()
        results = go_on(server.url, **expected["names"])
    assert results.keys() == expected["results"].keys()
    for name, values in expected["results"].items():
        if name.startswith("tokens"):
            assert results[name] == values, name
        else:  # other processors round otherwise
            np.testing.assert_allclose(results[name], values, rtol=0, atol=1e-4, err_msg=name)
