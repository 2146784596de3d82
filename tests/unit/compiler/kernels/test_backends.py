"""The one interface of code generators: every target has a back end, every back end its parts."""

from types import MappingProxyType

import pytest

from compiler.contract.operations import Op
from compiler.emitters.backends import BACKENDS, emitter_for
from compiler.emitters.c import CEmitter, PortableEmitter
from compiler.emitters.interface import EmitterError, Part
from compiler.hardware.targets import TARGETS, find_target


def test_it_finds_the_back_end_of_every_target() -> None:
    assert len({backend.name for backend in BACKENDS}) == len(BACKENDS)
    for target in TARGETS:
        assert emitter_for(target).name == target.backend


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.id)
def test_it_supplies_every_part_of_a_sparse_product(target) -> None:
    emitter = emitter_for(target)
    texts = {
        Part.INDEX: emitter.emit_index_calc(target),
        Part.LOAD: emitter.emit_sparse_load(target),
        Part.MMA: emitter.emit_mma(target),
        Part.STORE: emitter.emit_sparse_store(target),
    }
    assert set(emitter.parts) == set(Part)
    for part, text in texts.items():
        for name in emitter.parts[part]:
            assert f"{name}(" in text
        assert text.count("{") == text.count("}") > 0
    assert texts[Part.LOAD] not in texts[Part.MMA]


def test_it_gives_the_plain_tile_to_the_portable_back_end() -> None:
    best, plain = find_target("x86-64-v3"), PortableEmitter()
    assert plain.serves(best)
    assert plain.tile(best).isa == "portable"
    assert "_mm256" in emitter_for(best).emit_mma(best)
    assert "_mm256" not in plain.emit_mma(best)


def test_it_names_a_part_that_a_back_end_lacks() -> None:
    class Broken(CEmitter):
        name = "broken"
        parts = MappingProxyType({**CEmitter.parts, Part.LOAD: ("sf_no_such_load",)})

    with pytest.raises(EmitterError, match="broken back end does not define sf_no_such_load"):
        Broken().emit_sparse_load(find_target("x86-64-v1"))


def test_it_offers_every_operation_in_c() -> None:
    for backend in BACKENDS:
        if isinstance(backend, CEmitter):
            assert backend.capabilities() == frozenset(Op)
