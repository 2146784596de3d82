"""Rows as a bitmap and their values: the bits of the dense operations, and nothing else is read."""

import numpy as np
import pytest

from compiler.analysis.packed_points import packed_bytes
from compiler.contract.operations import Act, NormKind, Op, PackedKind
from compiler.emitters.runner import ScriptRun, play
from compiler.kernels.program import Module
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import ModuleBuilder
from tests.integration.test_native_emulated import RUNS, runner

ROWS, WIDTHS = 5, (1, 7, 8, 31, 32, 33, 100, 257)
DENSE_OPS = {PackedKind.ADD: Op.ADD, PackedKind.MUL: Op.MUL, PackedKind.SUB: Op.SUB}
NORMS = {PackedKind.RMS: NormKind.RMS, PackedKind.LAYER: NormKind.LAYER}


def both(width: int, kind: PackedKind, second: str) -> Module:
    """Return a program with an operation over dense rows (y) and over packed ones (z).

    `second`: the other operand is `input` rows, a stored `vector`, a `scale`, or the rows `self`.
    """
    b = ModuleBuilder(3, ROWS)
    x, relu, values = (b.buffer(None, width) for _ in range(3))
    mask, y, z = (
        b.buffer(None, -(-width // 32), "i32"),
        b.buffer(None, width),
        b.buffer(None, width),
    )
    b.call(Op.UNARY, [x], [relu], kind=0)
    b.call(Op.PACK, [x], [values, mask], act=Act.RELU)
    ports = {"x": x}
    if kind in NORMS:
        gamma = [b.vector(width, offset=1.0)] + (
            [b.vector(width)] if kind is PackedKind.LAYER else []
        )
        b.call(Op.NORM, [relu], [y], gamma, kind=NORMS[kind], eps=1e-5)
        b.call(Op.PACKED, [values, mask], [z], gamma, kind=kind, eps=1e-5)
    else:
        given, weights = [], []
        if second == "input":
            ports["b"] = b.buffer(None, width)
            given = [ports["b"]]
        elif second != "self":
            weights = [b.vector(width if second == "vector" else 1, scale=1.0)]
        dense = [relu] if second == "self" else given
        b.call(DENSE_OPS[kind], [relu, *dense], [y], weights, act=Act.SILU)
        b.call(Op.PACKED, [values, mask, *given], [z], weights, kind=kind, act=Act.SILU)
    b.program("run", ports, {"y": y, "z": z, "mask": mask})
    return b.module()


CASES = [
    *((kind, "input") for kind in DENSE_OPS),
    *((kind, "vector") for kind in DENSE_OPS),
    (PackedKind.MUL, "scale"),
    (PackedKind.MUL, "self"),
    *((kind, "gamma") for kind in NORMS),
]


def rows_of(module: Module, rows: int, share: float = 0.5) -> dict[str, np.ndarray]:
    random = np.random.default_rng(rows)
    found = {
        name: random.standard_normal((rows, module.buffers[at].cols)).astype(np.float32)
        for name, at in module.programs[0].inputs.items()
    }
    x = found["x"]
    found["x"] = np.where(random.random(x.shape) < share, -np.abs(x), np.abs(x))
    return found


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize(("kind", "second"), CASES)
def test_packed_rows_give_the_bits_of_dense_ones(
    kind: PackedKind, second: str, target: str
) -> None:
    for width in WIDTHS:
        case = Case.of(both(width, kind, second))
        with case.native(target) as plan:
            for rows in (1, ROWS):
                values = rows_of(case.module, rows)
                found = raw(plan.run("run", values))
                assert found["z"] == found["y"]
                assert found == raw(case.simulator().run("run", values))


@pytest.mark.parametrize("name", RUNS)
def test_every_other_machine_gives_the_same_bits(name: str) -> None:
    for kind, second in (CASES[0], CASES[-1]):
        case = Case.of(both(100, kind, second))
        values = rows_of(case.module, ROWS)
        runs = [ScriptRun("run", {role: one.tobytes() for role, one in values.items()})]
        found = play(*runner(name), case.emitted.plan_bytes, case.emitted.sections, runs)
        assert found == [raw(case.simulator().run("run", values))]


def packed_only(width: int, kind: PackedKind) -> Module:
    """Return an operation over packed rows that the caller gives."""
    b = ModuleBuilder(3, ROWS)
    values, mask = b.buffer(None, width), b.buffer(None, -(-width // 32), "i32")
    y, weight = b.buffer(None, width), b.vector(width, offset=1.0)
    b.call(Op.PACKED, [values, mask], [y], [weight], kind=kind)
    b.program("run", {"values": values, "mask": mask}, {"y": y})
    return b.module()


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("kind", [PackedKind.MUL, PackedKind.RMS])
def test_what_lies_behind_the_values_of_a_row_is_not_read(kind: PackedKind, target: str) -> None:
    """Half of the elements: the values that count and the mask are 0.53 of the dense bytes."""
    width = 256
    random = np.random.default_rng(0)
    kept = np.stack([random.permutation(width) < width // 2 for _ in range(ROWS)])
    mask = np.packbits(kept, axis=1, bitorder="little").view("<i4")
    values = np.zeros((ROWS, width), np.float32)
    values[:, : width // 2] = random.standard_normal((ROWS, width // 2))
    poisoned = values.copy()
    poisoned[:, width // 2 :] = np.nan
    module = packed_only(width, kind)
    case = Case.of(module)
    with case.native(target) as plan:
        clean = raw(plan.run("run", {"values": values, "mask": mask}))
        assert raw(plan.run("run", {"values": poisoned, "mask": mask})) == clean
    needed = int(np.count_nonzero(~np.isnan(poisoned))) * 4 + mask.nbytes
    assert needed <= 0.6 * values.nbytes
    call = module.programs[0].calls[0]
    assert packed_bytes(ROWS, module.buffers[call.inputs[0]].cols, 0.5) == needed


@pytest.mark.parametrize("target", native_targets())
def test_bits_beyond_the_columns_are_ignored(target: str) -> None:
    case = Case.of(packed_only(33, PackedKind.MUL))
    values = np.random.default_rng(1).standard_normal((ROWS, 33)).astype(np.float32)
    exact = np.tile(np.array([[-1, 1]], np.int32), (ROWS, 1))
    with case.native(target) as plan:
        expected = raw(plan.run("run", {"values": values, "mask": exact}))
        full = np.full((ROWS, 2), -1, np.int32)
        assert raw(plan.run("run", {"values": values, "mask": full})) == expected
