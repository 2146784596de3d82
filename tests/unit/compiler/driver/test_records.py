"""Dataclasses as cache entries: equal after a round, refused where they could not be."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from compiler.contract.operations import Act, Op
from compiler.driver.lowering import Lowered
from compiler.driver.records import UnkeepableError, from_parts, to_parts
from compiler.kernels.program import Buffer, Call, KvCache, Module, Program, Weight
from compiler.passes.origins import Provenance, SourceNode


class Colour(IntEnum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Inner:
    name: str
    colours: frozenset[Colour]


@dataclass(frozen=True)
class Everything:
    inner: Inner
    pairs: tuple[tuple[str, int], ...]
    mixed: tuple[int, str]
    by_name: Mapping[str, Inner | None]
    number: int | float
    absent: KvCache | None = None


@dataclass(frozen=True)
class Loose:
    anything: object


@dataclass(frozen=True)
class Either:
    value: Inner | KvCache


def test_it_rebuilds_every_kind_of_field() -> None:
    inner = Inner("ü", frozenset({Colour.BLUE, Colour.RED}))
    value = Everything(inner, (("a", 1), ("b", -2)), (3, "x"), {"i": inner, "n": None}, 0.1)
    found = from_parts(Everything, to_parts(value))
    assert found == value
    assert all(isinstance(colour, Colour) for colour in found.inner.colours)


def _lowered() -> Lowered:
    weights = (
        Weight(0, "w4", np.arange(12, dtype=np.float32).reshape(3, 4) / 7, "weights.shared"),
        Weight(1, "i32", np.array([5], np.int32), "weights.shared"),
        Weight(2, "f32", np.zeros((0, 4), np.float32), "expert.L0.E1"),
    )
    call = Call(Op.LINEAR, (0, -1), (1,), (0,), {"act": Act.RELU, "eps": 1e-5})
    return Lowered(
        Module(
            programs=(Program("forward", (call,), {"tensor": 0}, {"tensor": 1}),),
            buffers=(Buffer(0, 4, True, 4, "f32"), Buffer(1, 4, True, 3, "f32")),
            weights=weights,
            kv=KvCache(1, 2, 3, 4),
            max_tokens=4,
        ),
        "module {}",
        ("a note",),
        Provenance((SourceNode("model", "a", "Add"),), {"forward": ((0,),)}, (), {1: "unread"}),
        '{"forward": {}}',
    )


def test_it_rebuilds_a_lowered_module() -> None:
    value = _lowered()
    found = from_parts(Lowered, to_parts(value))
    assert (found.module.programs, found.module.buffers, found.module.kv) == (
        value.module.programs,
        value.module.buffers,
        value.module.kv,
    )
    assert (found.ir_text, found.notes) == (value.ir_text, value.notes)
    assert found.sparsity == value.sparsity
    for old, new in zip(value.module.weights, found.module.weights, strict=True):
        assert (new.id, new.kind, new.section) == (old.id, old.kind, old.section)
        assert new.array.dtype == old.array.dtype
        np.testing.assert_array_equal(new.array, old.array)


@pytest.mark.parametrize(
    "value",
    [
        Loose({1, 2}),
        Loose((1, 2)),
        Loose(np.array([None])),
        Either(Inner("a", frozenset())),
    ],
)
def test_it_refuses_what_it_could_not_rebuild(value: Any) -> None:
    with pytest.raises(UnkeepableError):
        to_parts(value)
