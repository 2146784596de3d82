"""The exported blocks under `examples/moe-exports`: raised, repaired, and run as native code."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import pytest

from compiler.kernels.program import ExpertAct, RouteOrder
from compiler.passes.pipeline import LoweredPipeline
from compiler.simulator import Simulator
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.onnx_models import graph_document, write_submission
from tests.factories.onnx_runs import Array, block_rows, lowered, reference_rows

EXPORTS: Final = Path(__file__).parents[2] / "examples" / "moe-exports"
FILES: Final = sorted(path.name for path in EXPORTS.glob("*.onnx"))
FAMILIES: Final = {
    "deepseek_v3": ("sigmoid_topk_renorm", "swiglu"),
    "gpt_oss": ("topk_softmax", "swiglu_clipped"),
    "granitemoe": ("topk_softmax", "swiglu"),
    "mixtral": ("softmax_topk_renorm", "swiglu"),
    "phimoe": ("sparsemixer", "swiglu"),
    "qwen2_moe": ("softmax_topk", "swiglu"),
    "qwen3_moe": ("softmax_topk", "swiglu"),
    "trap": ("softmax_topk", "swiglu"),
}
W4A8: Final = 0.2
"""Accepted size of the error of quantisation, relative to the size of the output: random weights
have no structure that four bits could keep."""


def family(name: str) -> str:
    return next(key for key in FAMILIES if key in name)


def submission(folder: Path, name: str) -> Path:
    model = onnx.load(EXPORTS / name)
    return write_submission(folder, {"model": model}, graph_document(model))


def answered(directory: Path) -> tuple[Array, Array]:
    """Return rows that ONNX Runtime can run the file on, and its answer.

    A traced loop only runs when exactly as many experts are hit as were traced.
    """
    for seed in range(60):
        x = block_rows(directory, 16, seed)
        try:
            return x, reference_rows(directory, x)
        except Exception as error:
            if "Split" not in str(error):
                raise
    pytest.fail("no rows hit as many experts as were traced")


@pytest.fixture(params=FILES, scope="module")
def export(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, LoweredPipeline]:
    directory = submission(tmp_path_factory.mktemp("export"), request.param)
    return request.param, directory, lowered(directory)


def test_it_has_every_export() -> None:
    assert len(FILES) == 22
    assert sum("eager" in name for name in FILES) == 7


def test_it_raises_router_and_experts(export: tuple[str, Path, LoweredPipeline]) -> None:
    name, _, pipeline = export
    route, experts = pipeline.module.programs[0].calls[:2]
    router, act = FAMILIES[family(name)]
    assert RouteOrder(int(route.params["order"])).name.lower() == router
    assert ExpertAct(int(experts.params["act"])).name.lower() == act
    assert any("judged by ONNX Runtime" in note for note in pipeline.notes)


def test_it_keeps_the_meaning(export: tuple[str, Path, LoweredPipeline]) -> None:
    _, directory, pipeline = export
    x, wanted = answered(directory)
    found = Simulator(pipeline.module, mode="f64").run_arrays("forward", {"tensor": x})["tensor"]
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_it_answers_natively_as_simulated(export: tuple[str, Path, LoweredPipeline]) -> None:
    _, directory, pipeline = export
    built = Case.of(pipeline.module)
    x, wanted = answered(directory)
    simulated = built.simulator().run("forward", {"tensor": x})
    for target in native_targets()[:1]:
        with built.native(target) as plan:
            assert raw(plan.run("forward", {"tensor": x})) == raw(simulated)
    found = np.frombuffer(raw(simulated)["tensor"], np.float32).reshape(wanted.shape)
    difference = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert difference <= W4A8


def test_it_repairs_a_trace_of_fifteen_experts(tmp_path: Path) -> None:
    """The file runs for inputs that hit 15 of 16 experts; the plan runs for all."""
    pipeline = lowered(submission(tmp_path, "trap.onnx"))
    assert any("15 traced expert bodies became one layer of 16" in n for n in pipeline.notes)
    sections = {w.section for w in pipeline.module.weights if w.section.startswith("expert.")}
    assert sections == {f"expert.L0.E{e}" for e in range(16)}


@pytest.mark.full
def test_it_raises_fresh_exports(tmp_path: Path) -> None:
    """Exports of the libraries that are installed, not those that were kept."""
    pytest.importorskip("torch", reason="torch is not installed: kept exports are tested instead")
    pytest.importorskip("transformers", reason="transformers is not installed")
    script = EXPORTS / "exporters" / "export_transformers.py"
    subprocess.run([sys.executable, script, tmp_path / "made"], check=True)
    made = sorted((tmp_path / "made").glob("*.onnx"))
    assert [path.name for path in made] == FILES
    for path in made:
        model = onnx.load(path)
        directory = write_submission(tmp_path / path.stem, {"model": model}, graph_document(model))
        pipeline = lowered(directory)
        x, wanted = answered(directory)
        simulator = Simulator(pipeline.module, mode="f64")
        found = simulator.run_arrays("forward", {"tensor": x})["tensor"]
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
