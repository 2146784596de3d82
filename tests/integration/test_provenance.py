"""Every node of a file is in a call, folded, or dead: exactly one of them, whatever was fused."""

from collections import Counter
from pathlib import Path

import onnx
import pytest

from compiler.frontend.describe import write_submission
from compiler.frontend.importer import import_pipeline
from compiler.passes.origins import UNREAD
from compiler.passes.pipeline import LoweredPipeline, lower_pipeline
from examples.edgecard.materialise import materialise
from tests.factories.model_files import model_file
from tests.factories.moe_exports import FILES, KEPT
from tests.factories.onnx_models import graph_document
from tests.factories.onnx_models import write_submission as write_models
from tests.integration.test_real_models import CASES, Published

HEAVY = ("Conv", "MatMul", "Gemm", "LSTM", "MoERouter", "MoEExpert")
"""Work that never happens at compile time when it depends on the input."""


def lowered(directory: Path) -> LoweredPipeline:
    return lower_pipeline(import_pipeline(directory))


def check_partition(pipeline: LoweredPipeline) -> None:
    """Check the partition, and that calls and nodes fit together."""
    found = pipeline.provenance
    inside = {number for rows in found.calls.values() for row in rows for number in row}
    fates = Counter([*inside, *found.folded, *found.dead])
    assert set(fates) == set(range(len(found.nodes)))
    assert set(fates.values()) == {1}
    for program in pipeline.module.programs:
        assert len(found.calls[program.name]) == len(program.calls)
    for number, why in found.dead.items():
        assert why == UNREAD, (found.nodes[number], why)  # what passes drop was taken over


def operators(pipeline: LoweredPipeline, program: str, call: int) -> list[str]:
    found = pipeline.provenance
    return [found.nodes[n].operator.rpartition("::")[2] for n in found.calls[program][call]]


@pytest.fixture(scope="module")
def edgecard(tmp_path_factory: pytest.TempPathFactory) -> LoweredPipeline:
    return lowered(materialise("v1", tmp_path_factory.mktemp("edgecard") / "v1"))


def test_every_node_of_edgecard_has_one_fate(edgecard: LoweredPipeline) -> None:
    check_partition(edgecard)
    assert not edgecard.provenance.dead


def test_a_fused_call_names_all_it_was_fused_from(edgecard: LoweredPipeline) -> None:
    step = next(p for p in edgecard.module.programs if p.name == "step")
    names = [call.op.name for call in step.calls]
    layer = operators(edgecard, "step", names.index("MOE_LAYER"))
    assert {"Pow", "ReduceMean", "Sqrt", "MoERouter", "MoEExpert", "Add"} <= set(layer)
    packed = operators(edgecard, "step", names.index("LINEAR"))
    assert packed.count("MatMul") == 3  # query, key and value side by side
    assert "ReduceMean" in packed
    attention = operators(edgecard, "step", names.index("ATTENTION"))
    assert {"Softmax", "Cos", "Sin", "MatMul"} <= set(attention)
    assert "MoEExpert" not in attention


def test_layers_do_not_share_their_products(edgecard: LoweredPipeline) -> None:
    found = edgecard.provenance
    for rows in found.calls.values():
        linears = [
            number
            for row in rows
            for number in row
            if found.nodes[number].name.startswith("node_linear")
        ]
        assert max(Counter(linears).values()) == 1


def test_the_order_of_fusion_changes_no_node(tmp_path: Path) -> None:
    imported = import_pipeline(materialise("v1", tmp_path / "v1"))
    plain = lower_pipeline(imported, fuse=False).provenance
    fused = lower_pipeline(imported).provenance
    assert plain.folded == fused.folded
    for name, rows in fused.calls.items():
        assert len(rows) < len(plain.calls[name])
        assert {n for row in rows for n in row} == {n for row in plain.calls[name] for n in row}


@pytest.mark.parametrize("published", CASES, ids=lambda item: item.file)
def test_every_node_of_a_published_file_has_one_fate(published: Published, tmp_path: Path) -> None:
    write_submission(
        model_file(published.file), tmp_path, published.dims or {}, published.constants
    )
    pipeline = lowered(tmp_path)
    check_partition(pipeline)
    found = pipeline.provenance
    folded = {found.nodes[number].operator for number in found.folded}
    assert folded.isdisjoint(HEAVY)
    if published.file == "silero":  # the branch for the other sampling rate
        assert len(found.dead) > len(found.nodes) // 2
    else:
        assert not found.dead


@pytest.mark.parametrize("name", FILES)
def test_every_node_of_an_exported_block_has_one_fate(name: str, tmp_path: Path) -> None:
    model = onnx.load(KEPT / name)
    pipeline = lowered(write_models(tmp_path, {"model": model}, graph_document(model)))
    check_partition(pipeline)
    (program,) = pipeline.module.programs
    at = [call.op.name for call in program.calls].index("EXPERTS")
    assert "MatMul" in operators(pipeline, program.name, at)
    assert not pipeline.provenance.dead
