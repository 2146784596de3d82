"""Fused plans: the same bits in fewer calls, nothing stored twice, and zeros judged by rule."""

from pathlib import Path

import pytest
from xdsl.dialects.test import TestOp as Given

from compiler.analysis.fusion import Verdict, invariant_of, verdict_of
from compiler.dialects.dims import Dim
from compiler.dialects.encoding import EncodingAttr
from compiler.dialects.hw import CallOp
from compiler.dialects.types import tensor_type
from compiler.frontend import import_pipeline
from compiler.kernels.program import Module, Op
from compiler.passes.functions import operations
from compiler.passes.fuse_groups import FuseGroups
from compiler.passes.pipeline import STAGES, run_passes
from compiler.passes.plan_kv import PlanKv
from tests.factories.onnx_models import write_tiny
from tests.factories.onnx_runs import lowered


def calls(module: Module, program: str) -> list[str]:
    found = next(p for p in module.programs if p.name == program)
    return [call.op.name for call in found.calls]


def floats(module: Module) -> int:
    return sum(weight.array.size for weight in module.weights)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_it_makes_a_decoder_layer_four_calls(tiny: Path) -> None:
    module = lowered(tiny).module
    layer = ["LINEAR_F32", "ATTENTION", "LINEAR_F32", "MOE_LAYER"]
    step = calls(module, "step")
    assert any(step[at : at + 4] == layer for at in range(len(step)))
    assert not {"ROPE", "ROUTE", "EXPERTS"} & set(step)
    unfused = calls(lowered(tiny, fuse=False).module, "step")
    assert {"ROPE", "ROUTE", "EXPERTS", "NORM"} <= set(unfused)


def test_it_stores_no_weight_twice(tiny: Path) -> None:
    """`see` only appends k and v of the last layer, `step` also asks with q."""
    fused, unfused = lowered(tiny).module, lowered(tiny, fuse=False).module
    assert floats(fused) == floats(unfused)
    assert sorted({w.section for w in fused.weights}) == sorted(
        {w.section for w in unfused.weights}
    )


def selected(tiny: Path, fusion: FuseGroups) -> tuple[list[CallOp], tuple[str, ...]]:
    imported = import_pipeline(tiny)
    module, ctx = imported.module, imported.context()
    for stage in STAGES.values():
        run_passes(module, ctx, [p for p in stage if not isinstance(p, FuseGroups | PlanKv)])
    result = fusion.run(module, ctx)
    module.verify()
    return [op for op in operations(module) if isinstance(op, CallOp)], result.notes


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_no_chain_is_deeper_than_asked(tiny: Path, depth: int) -> None:
    ops, notes = selected(tiny, FuseGroups(max_depth=depth))
    names = {op.op.data for op in ops}
    assert ("MOE_LAYER" in names) == (depth >= 4)
    assert ("ROPE" in names) == (depth < 2)
    for note in notes:
        if ":" in note and ">" in note and "became" not in note:
            assert note.split(": ")[1].count(" > ") < depth


def chain(kind: str, *, masks: bool) -> list[CallOp]:
    """NORM > LINEAR over rows with or without known zeros."""
    encoding = EncodingAttr.make((), ["dense", "compressed"], (), [0], dynamic=True)
    plain = tensor_type("float32", [4, 8])
    x = Given(result_types=[tensor_type("float32", [4, 8], encoding) if masks else plain])
    gamma = Given(result_types=[tensor_type("float32", [Dim(8)])])
    params = {"kind": 0 if kind == "rms" else 1, "eps": 1e-5}
    norm = CallOp("NORM", [x.results[0]], [gamma.results[0]], params, [plain])
    linear = CallOp("LINEAR", [norm.outputs[0]], [gamma.results[0]], {"act": 0}, [plain])
    return [norm, linear]


def test_zeros_are_judged_by_the_rules() -> None:
    assert verdict_of(chain("rms", masks=False)) is Verdict.DENSE
    assert verdict_of(chain("rms", masks=True)) is Verdict.PROVED
    assert verdict_of(chain("layer", masks=True)) is Verdict.UNPROVED


def test_without_the_dense_fallback_unproved_chains_stay_apart() -> None:
    strict, lenient = FuseGroups(allow_dense_fallback=False), FuseGroups()
    broken = chain("layer", masks=True)
    assert strict._admits(broken) is None
    assert lenient._admits(broken) is Verdict.UNPROVED
    assert strict._admits(chain("rms", masks=True)) is Verdict.PROVED


def test_every_operation_has_a_rule() -> None:
    x = Given(result_types=[tensor_type("float32", [4, 8])])
    for op in Op:
        params = {"kind": 0, "eps": 0.0} if op in (Op.NORM, Op.UNARY) else {}
        call = CallOp(op.name, [x.results[0]], [], params, [])
        assert invariant_of(call).value in {"preserving", "union", "contraction", "breaking"}
