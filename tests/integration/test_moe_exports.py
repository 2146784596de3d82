"""Exports of MoE blocks, kept and written anew: raised, repaired, judged, run as native code.

Those under `examples/moe-exports` are tested every day; with `--full` the pinned exporters write
them again and the same tests run on what they wrote.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import pytest

from compiler.errors import UserModelError
from compiler.kernels.program import ExpertAct, RouteOrder
from compiler.passes.pipeline import LoweredPipeline
from compiler.simulator import Simulator
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.moe_exports import (
    EDITS,
    FILES,
    KEPT,
    Edit,
    edited,
    fresh_exports,
    structure,
)
from tests.factories.onnx_models import graph_document, write_submission
from tests.factories.onnx_runs import Array, block_rows, lowered, reference_rows

FAMILIES: Final = {
    "deepseek_v3": ("sigmoid_topk_renorm", "swiglu"),
    "gpt_oss": ("topk_softmax", "swiglu_clipped"),
    "granitemoe": ("topk_softmax", "swiglu"),
    "mixtral": ("softmax_topk_renorm", "swiglu"),
    "olmoe": ("softmax_topk", "swiglu"),
    "phimoe": ("sparsemixer", "swiglu"),
    "qwen2_moe": ("softmax_topk", "swiglu"),
    "qwen3_moe": ("softmax_topk", "swiglu"),
    "trap": ("softmax_topk", "swiglu"),
}
W4A8: Final = 0.2
"""Accepted size of the error of quantisation, relative to the size of the output: random weights
have no structure that four bits could keep."""
FRESH: Final = [pytest.mark.full, pytest.mark.xdist_group("fresh-exports")]


@dataclass(frozen=True)
class Export:
    """A file, as a submission, compiled up to the plan."""

    name: str
    directory: Path
    pipeline: LoweredPipeline

    @property
    def family(self) -> str:
        return next(key for key in FAMILIES if key in self.name)


def submission(folder: Path, model: onnx.ModelProto) -> Path:
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


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_exports(tmp_path_factory.mktemp("fresh") / "exports")


@pytest.fixture(scope="module", params=["kept", pytest.param("fresh", marks=FRESH)])
def folder(request: pytest.FixtureRequest) -> Path:
    """Return a folder that holds every export."""
    return KEPT if request.param == "kept" else request.getfixturevalue("fresh")


@pytest.fixture(scope="module", params=FILES)
def export(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Export:
    model = onnx.load(folder / request.param)
    directory = submission(tmp_path_factory.mktemp("export"), model)
    return Export(request.param, directory, lowered(directory))


def test_it_has_every_export() -> None:
    assert len(FILES) == 25
    assert sum("eager" in name for name in FILES) == 8


@pytest.mark.full
@pytest.mark.xdist_group("fresh-exports")
def test_the_exporters_write_what_was_kept(fresh: Path) -> None:
    assert sorted(path.name for path in fresh.iterdir()) == FILES
    for name in FILES:
        assert structure(onnx.load(fresh / name)) == structure(onnx.load(KEPT / name)), name


def test_it_raises_router_and_experts(export: Export) -> None:
    route, experts = export.pipeline.module.programs[0].calls[:2]
    router, act = FAMILIES[export.family]
    assert RouteOrder(int(route.params["order"])).name.lower() == router
    assert ExpertAct(int(experts.params["act"])).name.lower() == act
    assert any("judged by ONNX Runtime" in note for note in export.pipeline.notes)


def test_it_keeps_the_meaning(export: Export) -> None:
    x, wanted = answered(export.directory)
    simulator = Simulator(export.pipeline.module, mode="f64")
    found = simulator.run_arrays("forward", {"tensor": x})["tensor"]
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_it_answers_natively_as_simulated(export: Export) -> None:
    built = Case.of(export.pipeline.module)
    x, wanted = answered(export.directory)
    simulated = built.simulator().run("forward", {"tensor": x})
    for target in native_targets()[:1]:
        with built.native(target) as plan:
            assert raw(plan.run("forward", {"tensor": x})) == raw(simulated)
    found = np.frombuffer(raw(simulated)["tensor"], np.float32).reshape(wanted.shape)
    difference = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert difference <= W4A8


def test_it_repairs_a_trace_of_fifteen_experts(folder: Path, tmp_path: Path) -> None:
    """The file runs for inputs that hit 15 of 16 experts; the plan runs for all."""
    pipeline = lowered(submission(tmp_path, onnx.load(folder / "trap.onnx")))
    assert any("15 traced expert bodies became one layer of 16" in n for n in pipeline.notes)
    sections = {w.section for w in pipeline.module.weights if w.section.startswith("expert.")}
    assert sections == {f"expert.L0.E{e}" for e in range(16)}


def means_something_else(directory: Path, x: Array, wanted: Array) -> bool:
    """Tell whether ONNX Runtime gives another answer, or misses an expert that the rows choose."""
    try:
        found = reference_rows(directory, x)
    except Exception as error:
        if "out of" not in str(error) and "invalid ind" not in str(error):
            raise
        return True
    return bool(np.abs(found - wanted).max() > 1e-3 * np.abs(wanted).max())


def is_raised(directory: Path) -> bool:
    try:
        calls = lowered(directory).module.programs[0].calls
    except UserModelError:
        return False
    return any(call.op.name == "EXPERTS" for call in calls)


@pytest.mark.parametrize(("name", "edit"), [pytest.param(n, e, id=f"{n}-{i}") for n, i, e in EDITS])
def test_it_does_not_raise_a_mutant(folder: Path, tmp_path: Path, name: str, edit: Edit) -> None:
    model = onnx.load(folder / name)
    original = submission(tmp_path / "original", model)
    mutant = submission(tmp_path / "mutant", edited(model, edit))
    x, wanted = answered(original)
    assert means_something_else(mutant, x, wanted)
    assert not is_raised(mutant)
