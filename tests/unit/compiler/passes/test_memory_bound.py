"""The arena of exported models, against the bound that no placement can beat."""

from pathlib import Path

import onnx
import pytest

from compiler.emitters.memory import plan_memory
from tests.factories.onnx_models import graph_document, write_submission, write_tiny
from tests.factories.onnx_runs import lowered

EXPORTS = sorted((Path(__file__).parents[4] / "examples" / "moe-exports").glob("*_dynamo.onnx"))


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.stem)
def test_exported_blocks_stay_within_five_percent(path: Path, tmp_path: Path) -> None:
    model = onnx.load(path)
    module = lowered(write_submission(tmp_path, {"model": model}, graph_document(model))).module
    plan = plan_memory(module)
    assert 0 < plan.max_live_bytes <= plan.arena_bytes <= 1.05 * plan.max_live_bytes


def test_a_whole_pipeline_stays_within_five_percent(tmp_path: Path) -> None:
    plan = plan_memory(lowered(write_tiny(tmp_path)).module)
    assert 0 < plan.max_live_bytes <= plan.arena_bytes <= 1.05 * plan.max_live_bytes
