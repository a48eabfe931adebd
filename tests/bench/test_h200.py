import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from tests.bench import h200, meter, roofline
from tests.bench.paged import attend_paged
from tests.bench.roofline import Ceilings
from tests.support.model_shapes import QWEN3_4B, QWEN3_8B


@pytest.mark.parametrize(
    "model, length, twice, expected",
    [
        (QWEN3_4B, 2048, False, 42.5),
        (QWEN3_4B, 2048, True, 28.9),
        (QWEN3_4B, 32768, False, 15.7),
        (QWEN3_8B, 2048, False, 24.0),
        (QWEN3_8B, 2048, True, 16.2),
        (QWEN3_8B, 8192, False, 20.1),
    ],
)
def test_thousands_of_tokens_that_can_be_trained_in_a_second(model, length, twice, expected):
    flops = roofline.training_flops(model, 32, length, twice=twice)
    assert 1e-3 / Ceilings().seconds(flops, 0) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "model, rows, context, expected",
    [
        (QWEN3_4B, 64, 1024, 15.4),
        (QWEN3_8B, 64, 1024, 11.0),
        (QWEN3_8B, 256, 1024, 20.4),
        (QWEN3_8B, 64, 8192, 3.0),
    ],
)
def test_thousands_of_tokens_that_can_be_decoded_in_a_second(model, rows, context, expected):
    moved = roofline.decode_bytes(model, 32, rows, context)
    seconds = Ceilings().seconds(roofline.decode_flops(model, 32, rows, context), moved)
    assert rows * 1e-3 / seconds == pytest.approx(expected, rel=0.03)


def test_figures_and_failures_become_tables():
    rows = [
        {"name": "a step", "milliseconds": 12.5, "of_ceiling": 0.5, "compile_seconds": 3},
        {"name": "another", "problem": "RuntimeError: no | memory"},
    ]
    lines = meter.markdown({"train": rows}).splitlines()
    assert "## train" in lines
    assert "| a step | 12.5 |  | 0.5 | 3 |  |  |" in lines
    assert "| another |  |  |  |  |  | problem RuntimeError: no / memory |" in lines


def test_the_ceilings_are_those_of_the_machine():
    rows = [
        {"name": "product of two matrices in bfloat16", "least_milliseconds": 2.0, "work": 1e12},
        {"name": "an empty program", "least_milliseconds": 0.1},
    ]
    assert h200.measured_ceilings(rows) == {"teraflops": 500.0, "gigabytes": Ceilings().gigabytes}


def test_cudnn_would_read_the_pages_of_all_layers_in_place(monkeypatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91500)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    q = jax.ShapeDtypeStruct((4, 8, 64), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((3, 20, 16, 2, 64), jnp.bfloat16)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    tables, positions = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 8), (4,)))
    traced = jax.jit(attend_paged).trace(q, (pool, pool), number, tables, positions)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    call = next(line for line in program.splitlines() if "@__cudnn$fmhaSoftmax(" in line)
    assert "tensor<60x16x2x64xbf16>" in call, "the pages of three layers"
    assert "tensor<4x1x15x1xi32>" in call, "and tables for all of them"
    assert "is_paged_attention\\22: true" in call


@pytest.mark.slow
def test_a_part_can_be_run_anywhere(tmp_path):
    out = tmp_path / "h200.json"
    out.write_text(json.dumps({"attention": "reference", "flags": [], "parts": {}}))
    command = [sys.executable, "-m", "tests.bench.h200", "--smoke", "--parts", "draws,decode"]
    subprocess.run([*command, "--out", str(out)], check=True, timeout=600)
    parts = json.loads(out.read_text())["parts"]
    assert set(parts) == {"draws", "decode"}
    assert not [row for rows in parts.values() for row in rows if "problem" in row]
    assert "4 rows, top 50" in out.with_suffix(".md").read_text()
