"""OpenCL C without a device: what is offered, what is refused, and what each launch will take."""

import re
import sys

import numpy as np
import pytest

from compiler.contract.operations import Op
from compiler.emitters.backends import emitter_for
from compiler.emitters.interface import Part
from compiler.emitters.opencl import device, emitter
from compiler.emitters.opencl.lists import StoredTiles, block_rows, work_list
from compiler.emitters.opencl.runner import LAUNCHERS
from compiler.errors import UnsupportedOperatorError
from compiler.hardware.targets import OPENCL, TARGETS, find_target

EMITTER = emitter_for(OPENCL)


def stored(live: list[list[int]], k: int = 96) -> StoredTiles:
    """Return a matrix with these live groups per panel."""
    first = np.concatenate([[0], np.cumsum([len(groups) for groups in live])])
    index = np.asarray([group for groups in live for group in groups], np.int64)
    return StoredTiles(16 * len(live) - 3, k, 100, 900, 990, first, index)


def test_it_is_found_by_name_and_by_no_machine() -> None:
    assert find_target("opencl") is OPENCL
    assert EMITTER.name == OPENCL.backend == "opencl"
    assert OPENCL not in TARGETS
    assert OPENCL.arch not in {target.arch for target in TARGETS}


def test_it_has_kernels_and_launches_for_every_operation() -> None:
    assert set(LAUNCHERS) == EMITTER.capabilities() == set(Op) - {Op.PACK, Op.PACKED}


def test_it_refuses_by_name_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {op: names for op, names in emitter.TEMPLATES.items() if op is not Op.REF_SCAN}
    monkeypatch.setattr(emitter, "TEMPLATES", rest)
    with pytest.raises(UnsupportedOperatorError, match="no kernel for REF_SCAN") as caught:
        EMITTER.emit([Op.LINEAR, Op.REF_SCAN], OPENCL)
    assert "LINEAR" in caught.value.hint


@pytest.mark.parametrize("op", sorted(EMITTER.capabilities()))
def test_it_renders_each_operation_alone(op: Op) -> None:
    source = EMITTER.emit([op], OPENCL)
    assert "${" not in source
    assert "\n$" not in source
    assert source.index("FP_CONTRACT OFF") < source.index("sf_exp8")
    assert source == EMITTER.emit([op, op], OPENCL)
    assert EMITTER.build(source, OPENCL, None) == source.encode()  # type: ignore[arg-type]


def test_it_never_adds_floats_by_chance() -> None:
    source = EMITTER.emit(EMITTER.capabilities(), OPENCL)
    assert set(re.findall(r"\batom\w*", source)) == {"atomics", "atomic_cmpxchg"}
    assert not re.search(r"\b(fma|mad|native_\w+|half_\w+|fast_\w+)\(", source)
    assert not any("relaxed" in option or "unsafe" in option for option in device.OPTIONS)


def test_it_supplies_every_part_of_a_sparse_product() -> None:
    assert set(EMITTER.parts) == set(Part)
    assert "vload4(0, tile + 64 * cell + 4 * lane)" in EMITTER.emit_sparse_load(OPENCL)
    assert "sf_group_mac" in EMITTER.emit_mma(OPENCL)
    assert "sf_acc_float" in EMITTER.emit_sparse_store(OPENCL)
    assert "get_group_id(1)" in EMITTER.emit_index_calc(OPENCL)


def test_it_lists_live_tiles_in_order() -> None:
    weight = stored([[0, 2], [], [1]])
    listed = work_list([(weight, 4, 1)])
    assert listed.block == 1
    assert listed.work.tolist() == [[100, 900, 0, 4, 1], [116, 901, 2, 4, 1], [132, 902, 1, 4, 1]]
    assert listed.runs[:, :4].tolist() == [[0, 2, 0, 16], [2, 0, 16, 16], [2, 1, 32, 13]]
    assert listed.runs[:, 6].tolist() == [990, 994, 998]


def test_it_cuts_rows_into_blocks() -> None:
    weight = stored([[0, 1, 2], [0, 1]])
    listed = work_list([(weight, 0, 11), (weight, 11, 0), (weight, 20, 2)])
    assert listed.block == 8
    assert len(listed.work) == 3 * weight.live
    assert sorted(set(map(tuple, listed.work[:, 3:].tolist()))) == [(0, 8), (8, 3), (20, 2)]
    assert listed.runs[:, 0].tolist() == [0, 3, 5, 8, 10, 13]
    assert (listed.local_bytes, listed.partial_bytes) == (256, 15 * 8 * 16 * 4)


def test_it_takes_smaller_blocks_of_sparser_weights() -> None:
    assert [block_rows(density, 99) for density in (1.0, 0.51, 0.5, 0.2, 0.1, 0.0)] == [
        *(8, 8, 4, 4, 2, 2),
    ]
    assert block_rows(1.0, 3) == 3
    assert len(work_list([]).work) == len(work_list([(stored([[]]), 0, 2)]).work) == 0


def test_it_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(device.OpenClError, match="cannot be run") as caught:
        device.Device("")
    assert "pyopencl[pocl]" in caught.value.hint
    assert not device.is_available()
