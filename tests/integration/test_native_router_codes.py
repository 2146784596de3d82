"""Routers stored as 8- and 16-bit codes: the bits of the same matrix stored as f32."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.operations import Op, RouteOrder
from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import Kind
from compiler.contract.planes import require_cover
from compiler.driver.bundle_simulator import module_of
from compiler.kernels.program import Module, NormKind, ProgramError, validate_module
from compiler.quant.row_codes import I8, I16, find_codes, layout_of, round_to_codes
from compiler.quant.w4 import QuantError
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import ModuleBuilder, single_call
from tests.integration.test_native_fused import moe

BITS = (4, 6, 8, 16)
KINDS = {I8: Kind.I8_ROWS, I16: Kind.I16_ROWS}


def router(experts: int, width: int, bits: int, order: RouteOrder, seed: int = 0) -> Module:
    random = np.random.default_rng(seed)
    weight = random.standard_normal((experts, width)).astype(np.float32)
    weight[experts // 2] = 0
    bias = random.standard_normal(experts).astype(np.float32)
    return on_grid(
        single_call(
            Op.ROUTE,
            [(None, width, "f32")],
            [(None, 2, "i32"), (None, 2, "f32")],
            [("f32", weight), ("f32", bias)],
            {"k": 2, "order": order},
        ),
        0,
        bits,
    )


def on_grid(module: Module, at: int, bits: int, *, dense: bool = False) -> Module:
    weights = list(module.weights)
    values = round_to_codes(weights[at].array, bits).values()
    layout = "dense" if dense else layout_of(bits)
    weights[at] = replace(weights[at], array=values, layout=layout)
    return replace(module, weights=tuple(weights))


def as_f32(module: Module) -> Module:
    weights = tuple(replace(weight, layout="dense") for weight in module.weights)
    return replace(module, weights=weights)


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("experts", "width"), [(4, 8), (7, 13), (16, 128), (3, 33)])
def test_codes_give_the_bits_of_the_f32_matrix(target, bits, experts, width) -> None:
    for order in (RouteOrder.TOPK_SOFTMAX, RouteOrder.SIGMOID_TOPK):
        module = router(experts, width, bits, order)
        coded, plain = Case.of(module), Case.of(as_f32(module))
        kind = parse_plan(coded.emitted.plan_bytes).weights[0].kind
        assert kind is KINDS[layout_of(bits)]
        x = np.random.default_rng(1).standard_normal((5, width)).astype(np.float32)
        values = {"x0": x.tobytes()}
        expected = raw(plain.simulator().run("run", values))
        assert raw(coded.simulator().run("run", values)) == expected
        with coded.native(target) as native, plain.native(target) as before:
            assert raw(before.run("run", values)) == expected
            assert raw(native.run("run", values)) == expected


@pytest.mark.parametrize("target", native_targets())
def test_a_fused_layer_reads_codes_too(target: str) -> None:
    module = moe(NormKind.RMS, 0, residual=True, fused=True)
    at = next(call for p in module.programs for call in p.calls).weights[2]
    x = np.random.default_rng(3).standard_normal((6, 24)).astype(np.float32)
    for bits in (8, 16):
        coded = Case.of(on_grid(module, at, bits))
        plain = Case.of(on_grid(module, at, bits, dense=True))
        with coded.native(target) as native, plain.native(target) as before:
            values = {"x": x.tobytes()}
            expected = raw(before.run("run", values))
            assert raw(native.run("run", values)) == expected
            assert raw(coded.simulator().run("run", values)) == expected


@pytest.mark.parametrize("bits", BITS)
def test_what_is_stored_reads_back_as_it_was(bits: int) -> None:
    module = router(9, 40, bits, RouteOrder.TOPK_SOFTMAX)
    emitted = Case.of(module).emitted
    back, _ = module_of({**emitted.sections, "plan": emitted.plan_bytes})
    assert np.array_equal(back.weights[0].array, module.weights[0].array)
    assert back.weights[0].layout == module.weights[0].layout
    again = Case.of(back).emitted
    assert (again.plan_bytes, again.sections) == (emitted.plan_bytes, emitted.sections)
    for name, planes in emitted.planes.items():
        require_cover(planes, len(emitted.sections[name]))
    dense = Case.of(as_f32(module)).emitted.sections["weights.shared"]
    assert len(emitted.sections["weights.shared"]) < len(dense)


def test_codes_are_found_only_on_a_grid() -> None:
    random = np.random.default_rng(4)
    for scale in (1e-30, 1e-3, 1.0, 1e20):
        weight = (scale * random.standard_normal((6, 20))).astype(np.float32)
        for bits in BITS:
            values = round_to_codes(weight, bits).values()
            found = find_codes(values, layout_of(bits))
            assert np.array_equal(found.values(), values)
            assert np.abs(found.codes).max() < 2 ** (8 if layout_of(bits) == I8 else 16) // 2
    with pytest.raises(QuantError, match="no grid"):
        find_codes(random.standard_normal((2, 20)).astype(np.float32), I16)
    with pytest.raises(QuantError, match="no grid"):
        find_codes(round_to_codes(weight, 16).values(), I8)


def test_only_some_matrices_may_be_stored_as_codes() -> None:
    builder = ModuleBuilder()
    x, y = builder.buffer(None, 8), builder.buffer(None, 4)
    weight = builder.weight(round_to_codes(builder.normal(4, 8), 16).values())
    builder.call(Op.LINEAR_F32, [x], [y], [weight])
    builder.program("run", {"x": x}, {"y": y})
    module = builder.module()
    wrong = replace(module, weights=(replace(module.weights[0], layout=I16),))
    with pytest.raises(ProgramError, match="LINEAR_F32 weight 0 is i16"):
        Case.of(wrong)
    four_bit = replace(module, weights=(replace(module.weights[0], kind="w4", layout=I8),))
    with pytest.raises(ProgramError, match="layout"):
        validate_module(four_bit)


def test_a_plan_with_codes_of_another_size_is_refused() -> None:
    emitted = Case.of(router(4, 24, 8, RouteOrder.TOPK_SOFTMAX)).emitted
    weight = parse_plan(emitted.plan_bytes).weights[0]
    assert weight.length == 2 * 64 + 4 * 4
    changed = bytearray(emitted.plan_bytes)
    record = int(Kind.I8_ROWS).to_bytes(4, "little") + bytes(4) + (4).to_bytes(4, "little")
    at = bytes(changed).index(record)
    changed[at : at + 4] = int(Kind.I16_ROWS).to_bytes(4, "little")
    with pytest.raises(PlanError, match="takes 208 bytes, not 144"):
        parse_plan(bytes(changed))
    unknown = max(Kind) + 1
    changed[at : at + 4] = unknown.to_bytes(4, "little")
    with pytest.raises(PlanError, match=f"kind {unknown} is unknown"):
        parse_plan(bytes(changed))
