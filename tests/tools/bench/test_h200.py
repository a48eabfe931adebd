import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from spmd_tx.models.attention.kv_cache import copy_pages
from tests.support.model_shapes import QWEN3_4B, QWEN3_8B, TINY, resized
from tools.bench import h200, h200_checks, h200_page, meter, roofline
from tools.bench.dummy import Dummy
from tools.bench.paged import attend_paged
from tools.bench.roofline import Ceilings

KERNEL_OF_GPUS = ("Only interpret mode is supported on CPU backend.", "cuDNN is not detected.")


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
        {"name": "a step", "part": "head", "milliseconds": 2.5, "predicted_milliseconds": 2.0},
        {"name": "another", "problem": "RuntimeError: no | memory"},
    ]
    lines = meter.markdown({"train": rows}).splitlines()
    assert "## train" in lines
    assert "| what | ms | predicted, ms | of ceiling | compiled in s | else |" in lines
    assert "| a step | 12.5 |  | 0.5 | 3 |  |" in lines
    assert "| a step | 2.5 | 2 |  |  | part head |" in lines
    assert "| another |  |  |  |  | problem RuntimeError: no / memory |" in lines


def test_tables_stand_between_the_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{h200_page.BEGIN}\nold\n{h200_page.END}\nafter\n")
    report = {
        "machine": "NVIDIA H200",
        "date": "2027-01-31",
        "self_test": {"cudnn": "it is off by 3", "reference": None},
        "parts": {
            "kernels": [{"name": "attention, triton", "verdict": "right"}] * 3,
            "draws": [{"name": "64 rows, all", "milliseconds": 0.25}],
        },
    }
    for _ in range(2):  # the second time it replaces the first
        h200_page.put(page, report)
    text = page.read_text()
    assert text.startswith(f"before\n{h200_page.BEGIN}\n\nMeasured on NVIDIA H200 on 2027-01-31")
    assert text.endswith(f"{h200_page.END}\nafter\n")
    assert "attention 'cudnn' is not used: it is off by 3" in text
    assert text.count("| 64 rows, all | 0.25 |") == 1
    assert text.count("3 checks, all of them right.") == 1
    assert "old" not in text


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        h200_page.put(page, {"parts": {}})


def test_the_page_of_figures_has_the_marks():
    text = h200.PAGE.read_text()
    assert text.index(h200_page.BEGIN) < text.index(h200_page.END)


def test_only_what_checks_find_is_a_failure():
    parts = {
        "copies": [
            {"name": "copy_pages", "problem": "3 pages are wrong"},
            {"name": "write", "wrong_pages": 0},
        ],
        "train": [{"name": "8B", "problem": "out of memory"}],
    }
    assert h200.failures({"parts": parts}, ["copies", "train"]) == ["copy_pages: 3 pages are wrong"]
    assert not h200.failures({"parts": parts}, ["train"])


def small_meter(tmp_path) -> meter.Meter:
    return meter.Meter(tmp_path / "rows", deadline=float("inf"))


def small_dummy() -> Dummy:
    return Dummy(resized(TINY, n_layers=1, n_kv_heads=1, head_dim=8), 4, 1, jnp.dtype(jnp.bfloat16))


@pytest.mark.slow
def test_pages_that_are_copied_wrong_are_noticed(tmp_path, monkeypatch):
    def loses_one(_mesh, _declared):
        return lambda cache, pairs: copy_pages(cache, jnp.asarray(pairs)[1:])

    found = small_meter(tmp_path)
    h200_checks.copies(found, small_dummy(), pages=60)
    assert [row.get("wrong_pages") for row in found.rows] == [0] * 5
    monkeypatch.setattr(h200_checks, "make_copy_pages", loses_one)
    found = small_meter(tmp_path)
    h200_checks.copies(found, small_dummy(), pages=60)
    assert found.rows[0]["problem"] == "2 pages are wrong, in layers [0]"


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
    pool = jax.ShapeDtypeStruct((3, 20, 16, 2 * 64), jnp.bfloat16)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    tables, positions = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 8), (4,)))
    traced = jax.jit(attend_paged).trace(q, (pool, pool), number, tables, positions)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    call = next(line for line in program.splitlines() if "@__cudnn$fmhaSoftmax(" in line)
    assert "tensor<60x16x2x64xbf16>" in call, "the pages of three layers"
    assert "tensor<4x1x15x1xi32>" in call, "and tables for all of them"
    assert "is_paged_attention\\22: true" in call


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_parts_run_anywhere(tmp_path):
    out = tmp_path / "h200.json"
    command = [sys.executable, "-m", "tools.bench.h200", "--dry-run", "--out", str(out)]
    subprocess.run(command, check=True, timeout=900)
    parts = json.loads(out.read_text())["parts"]
    assert parts.keys() == h200.PARTS.keys()
    problems = [row["problem"] for rows in parts.values() for row in rows if "problem" in row]
    assert all(problem.endswith(KERNEL_OF_GPUS) for problem in problems), problems
    for part in ("train", "decode", "prefill"):
        of_parts = {row["part"]: row for row in parts[part] if "part" in row}
        assert of_parts.keys() >= {"attention", "feed-forward", "adapters"}
        assert sum(row["milliseconds"] for row in of_parts.values()) > 0
        assert all("predicted_milliseconds" in row for row in of_parts.values())
    assert "4 rows, top 50" in out.with_suffix(".md").read_text()
