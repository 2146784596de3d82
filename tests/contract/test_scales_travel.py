"""Scales travel with the model: a plan or a section without them does not load."""

import struct

import pytest

from compiler.contract.native_errors import NativeError
from compiler.contract.native_weights import LoadedWeights
from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import WEIGHT, Kind, weight_parts
from compiler.emitters.plan import read_packed
from compiler.quant.w4 import PackedW4, QuantError, unpack_w4
from tests.contract.test_plan_hostile import peek, poke
from tests.factories.kernels import Case
from tests.factories.modules import small_decoder


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.of(small_decoder())


def test_it_refuses_a_plan_that_leaves_no_room_for_scales(case: Case) -> None:
    plan_bytes = case.emitted.plan_bytes
    plan = parse_plan(plan_bytes)
    number = next(at for at, weight in enumerate(plan.weights) if weight.kind is Kind.W4)
    weight = plan.weights[number]
    codes, scales, rows = weight_parts(weight.kind, weight.rows, weight.cols)
    assert codes[1] + scales[1] + rows[1] <= weight.length
    for kept in (codes[1], codes[1] + scales[1], weight.length - rows[1], weight.length - 1):
        with pytest.raises(PlanError, match="takes"):
            parse_plan(poke(plan_bytes, WEIGHT, number, "bytes", kept))
    assert peek(plan_bytes, WEIGHT, number, "bytes") == weight.length


def test_the_loader_refuses_a_section_without_its_last_scales(case: Case) -> None:
    plan = parse_plan(case.emitted.plan_bytes)
    name = next(section.name for section in plan.sections if section.name.startswith("expert."))
    whole = case.emitted.sections
    table = LoadedWeights(plan.sections, whole).table(plan.sections)
    assert [row.bytes for row in table] == [section.length for section in plan.sections]
    for short in (whole[name][:-4], b""):
        with pytest.raises(NativeError, match=name):
            LoadedWeights(plan.sections, {**whole, name: short})
    with pytest.raises(NativeError, match="missing"):
        LoadedWeights(plan.sections, {key: data for key, data in whole.items() if key != name})


def test_scales_of_zero_are_no_scales(case: Case) -> None:
    plan = parse_plan(case.emitted.plan_bytes)
    for packed in read_packed(plan, case.emitted.sections).values():
        empty = PackedW4(packed.n, packed.k, packed.codes, bytes(len(packed.scales)), packed.rows)
        with pytest.raises(QuantError, match="zero"):
            unpack_w4(empty)
        (first,) = struct.unpack_from("<f", packed.rows)
        assert first > 0
