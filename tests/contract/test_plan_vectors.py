"""Plan and packed-weight bytes that devices in the field rely on; these files never change."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from compiler.contract.operations import Op
from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import RECORDS, DType, Kind, Status
from compiler.contract.planes import Plane, require_cover
from compiler.emitters.plan import read_packed
from compiler.kernels.program import Module
from compiler.quant.w4 import Grid, GridReport, PackedW4, W4Matrix, pack_w4, unpack_w4
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import single_call

VECTORS = Path(__file__).parent / "vectors" / "plan"


def vector(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_text())
    return found


def module() -> Module:
    n, k = np.arange(17)[:, None], np.arange(40)[None]
    weight = ((n * 5 + k * 7) % 31 - 15).astype(np.float32) / 16
    bias = np.arange(17, dtype=np.float32) / 8
    return single_call(
        Op.LINEAR,
        [(None, 40, "f32")],
        [(None, 17, "f32")],
        [("w4", weight), ("f32", bias)],
        {"act": 1},
        max_tokens=4,
    )


def test_it_packs_weights_as_ever() -> None:
    kept = vector("w4-17x40")
    n, k = np.arange(17)[:, None], np.arange(40)[None]
    codes = ((n * 7 + k * 3) % 16).astype(np.uint8)
    scales = ((n * 11 + np.arange(2)[None] * 5) % 255 + 1).astype(np.uint8)
    rows = (2.0 ** -(np.arange(17) % 9)).astype(np.float32)
    packed = pack_w4(W4Matrix(codes, Grid(scales, rows), GridReport(0)))
    assert packed.codes.hex() == kept["codes"]
    assert packed.scales.hex() == kept["scales"]
    assert packed.rows.hex() == kept["rows"]
    parts = (bytes.fromhex(kept[name]) for name in ("codes", "scales", "rows"))
    assert np.array_equal(unpack_w4(PackedW4(17, 40, *parts)).codes, codes)


def test_it_emits_plan_and_sections_as_ever() -> None:
    kept, emitted = vector("linear"), Case.of(module()).emitted
    assert emitted.plan_bytes.hex() == kept["plan"]
    assert {name: data.hex() for name, data in emitted.sections.items()} == kept["sections"]
    planes = {name: [Plane(*plane) for plane in found] for name, found in kept["planes"].items()}
    assert {name: list(found) for name, found in emitted.planes.items()} == planes
    for name, found in planes.items():
        require_cover(found, len(emitted.sections[name]))


def test_it_reads_and_runs_kept_bytes() -> None:
    kept = vector("linear")
    case = Case.of(module())
    plan = parse_plan(bytes.fromhex(kept["plan"]))
    sections = {name: bytes.fromhex(data) for name, data in kept["sections"].items()}
    assert read_packed(plan, sections)[0] == case.packed.packed[0] or (
        read_packed(plan, sections)[0].codes == case.packed.packed[0].codes
    )
    values = {"x0": bytes.fromhex(kept["input"])}
    assert raw(case.simulator().run("run", values))["y0"].hex() == kept["output"]
    for target in native_targets():
        with case.native(target) as native:
            assert raw(native.run("run", values))["y0"].hex() == kept["output"]


def test_it_keeps_its_numbers() -> None:
    sizes = {record.name: record.layout.size for record in RECORDS}
    assert sizes == {
        "sf_header": 88,
        "sf_section_record": 40,
        "sf_weight_record": 32,
        "sf_buffer_record": 32,
        "sf_program_record": 48,
        "sf_port_record": 40,
        "sf_call_record": 48,
    }
    names = (
        "IMAGE_U8 EMBED LINEAR LINEAR_F32 NORM ROPE ATTENTION ATTENTION_ROW PRUNE CONV2D "
        "ROWS_CONCAT ROWS_SLICE ADD MUL SUB DIV UNARY SOFTMAX ROUTE EXPERTS ARGMAX GATHER_ROWS "
        "COLS_CONCAT COLS_SLICE ATTENTION_SCORE PRUNE_TOP_P MOE_LAYER EXPERT_PREFETCH EXPERT_LOAD "
        "LINEAR_W8 RECURRENT RECURRENT_F32 CONV_DEPTHWISE PACK PACKED "
        "SPARSE_CONV EXPERT_FORESEE"
    )
    fast = [op for op in Op if op < 128]
    assert " ".join(op.name for op in fast) == names
    assert [int(op) for op in fast] == list(range(1, len(fast) + 1))
    reference = (
        "REF_MOVE REF_MAP REF_REDUCE REF_CONTRACT REF_CONV REF_CONV_TRANSPOSE REF_POOL "
        "REF_RESAMPLE REF_GATHER REF_SCATTER REF_TOPK REF_SCAN"
    )
    assert " ".join(op.name for op in Op if op >= 128) == reference
    assert [int(op) for op in Op if op >= 128] == list(range(128, 140))
    assert [kind.name for kind in Kind] == [
        *("W4", "F32", "I32", "F32_TAPS", "W4_TILES", "I8_ROWS", "I16_ROWS"),
        *("W4_CSR", "W4_COO", "W4_ELL", "W8", "W4_NM", "W4_UP_ROWS", "W4_COLUMNS"),
    ]
    assert [dtype.name for dtype in DType] == ["F32", "I32", "U8"]
    assert (Status.OK, Status.CONTEXT_FULL, Status.NOT_FINITE) == (0, 6, 10)
