"""Packed live tiles: the bits of dense weights, fewer bytes, and no trust in an index."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.native_errors import NativeError
from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import Kind
from compiler.contract.tiles import live_tiles, tile_bytes, tile_parts
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.emitters.plan import read_packed
from compiler.emitters.tiles import live_mask, pack_tiles, unpack_tiles
from compiler.kernels.program import DENSE, TILES, ExpertAct, Module, Op
from tests.factories.kernels import Case, ids, native_targets, raw
from tests.factories.modules import ModuleBuilder

TOKENS = 8


def block_sparse(b: ModuleBuilder, n: int, k: int, density: float) -> np.ndarray:
    """Return normal values in about `density` of the 16 x 32 tiles, zeros in the others."""
    tiles = b.random.random((-(-n // 16), -(-k // 32))) < density
    tiles[-1, -1] = True
    return b.normal(n, k) * np.kron(tiles, np.ones((16, 32), np.float32))[:n, :k]


def linear(layout: str, n: int = 90, k: int = 200, density: float = 0.4) -> Module:
    b = ModuleBuilder(2, TOKENS)
    weight = b.weight(block_sparse(b, n, k, density), "w4")
    b.weights[weight] = replace(b.weights[weight], layout=layout)
    x, y = b.buffer(None, k), b.buffer(None, n)
    b.call(Op.LINEAR, [x], [y], [weight, b.vector(n)], act=1)
    b.program("run", {"x": x}, {"y": y})
    return b.module()


def experts(layout: str) -> Module:
    b = ModuleBuilder(3, TOKENS)
    weights = []
    for expert in range(4):
        for shape in ((96, 48), (48, 96)):
            array = block_sparse(b, *shape, 0.4)
            weights.append(b.weight(array, "w4", f"expert.L0.E{expert}"))
            b.weights[-1] = replace(b.weights[-1], layout=layout)
    x, index, gate = b.buffer(None, 48), b.buffer(None, 2, "i32"), b.buffer(None, 2)
    y = b.buffer(None, 48)
    b.call(Op.EXPERTS, [x, index, gate], [y], weights, act=ExpertAct.RELU)
    b.program("run", {"x": x, "index": index, "gate": gate}, {"y": y})
    return b.module()


def inputs(module: Module, tokens: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(tokens)
    found = {
        role: random.standard_normal((tokens, module.buffers[at].cols)).astype(np.float32)
        for role, at in module.programs[0].inputs.items()
    }
    if "index" in found:
        found["index"] = np.concatenate([ids(random.permutation(4)[:2]).T for _ in range(tokens)])
    return found


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("build", [linear, experts])
def test_tiles_give_the_bits_of_dense_weights(build, target: str) -> None:
    dense, tiled = Case.of(build(DENSE)), Case.of(build(TILES))
    assert {w.kind for w in parse_plan(dense.emitted.plan_bytes).weights} <= {Kind.W4, Kind.F32}
    assert Kind.W4_TILES in {w.kind for w in parse_plan(tiled.emitted.plan_bytes).weights}
    sections = {**tiled.emitted.sections, "plan": tiled.emitted.plan_bytes}
    bundle = BundleSimulator(sections)
    with dense.native(target) as one, tiled.native(target) as other:
        for tokens in (1, 3, TOKENS):
            values = inputs(dense.module, tokens)
            expected = raw(one.run("run", values))
            assert raw(other.run("run", values)) == expected
            assert raw(tiled.simulator().run("run", values)) == expected
            assert raw(bundle.run("run", values)) == expected


def test_tiles_take_the_bytes_of_what_is_left() -> None:
    dense, tiled = Case.of(linear(DENSE, density=0.25)), Case.of(linear(TILES, density=0.25))
    sizes = [len(case.emitted.sections["weights.shared"]) for case in (dense, tiled)]
    live = int(live_mask(tiled.packed.packed[0]).sum())
    assert sizes[0] - sizes[1] > (6 * 7 - live) * 272 - 512


def test_packing_and_unpacking_are_inverse() -> None:
    module = linear(TILES)
    case = Case.of(module)
    found = read_packed(parse_plan(case.emitted.plan_bytes), case.emitted.sections)[0]
    packed = case.packed.packed[0]
    assert (found.codes, found.rows) == (packed.codes, packed.rows)
    parts = pack_tiles(packed)
    assert parts is not None
    assert pack_tiles(found) == parts


def test_full_and_empty_weights_stay_dense() -> None:
    for density in (1.0, 0.0):
        module = linear(TILES, density=density)
        if density == 0.0:
            module.weights[0].array[:] = 0.0
        kinds = {w.kind for w in parse_plan(Case.of(module).emitted.plan_bytes).weights}
        assert Kind.W4_TILES not in kinds


def test_the_number_of_tiles_follows_from_the_bytes() -> None:
    for rows, cols in ((1, 1), (16, 32), (90, 200), (4096, 8192)):
        most = -(-rows // 16) * -(-cols // 32)
        for live in {1, 2, most // 2, most - 1, most} & set(range(1, most + 1)):
            assert live_tiles(rows, cols, tile_bytes(rows, live)) == live
            assert live_tiles(rows, cols, tile_bytes(rows, live) + 1) in (None, live + 1)
    assert live_tiles(16, 32, tile_bytes(16, 2)) is None
    assert live_tiles(16, 32, 0) is None
    assert live_tiles(16, 257 * 32, tile_bytes(16, 2)) is None


@pytest.mark.parametrize("damage", ["index beyond", "index falls", "first falls", "first beyond"])
def test_the_runtime_refuses_an_index_that_is_none(damage: str) -> None:
    case = Case.of(linear(TILES))
    live = live_tiles(90, 200, parse_plan(case.emitted.plan_bytes).weights[0].length)
    assert live is not None
    parts = tile_parts(90, live)
    data = bytearray(case.emitted.sections["weights.shared"])
    first, index = parts[3][0], parts[4][0]
    match damage:
        case "index beyond":
            data[index] = 200
        case "index falls":
            data[index : index + live] = bytes(live)
        case "first falls":
            data[first + 8 : first + 12] = (0).to_bytes(4, "little")
        case _:
            data[first + 4 : first + 8] = (live + 9).to_bytes(4, "little")
    broken = replace(case.emitted, sections={"weights.shared": bytes(data)})
    with pytest.raises(NativeError):
        replace(case, emitted=broken).native(native_targets()[0])


def test_the_device_refuses_a_length_of_no_number_of_tiles() -> None:
    plan_bytes = Case.of(linear(TILES)).emitted.plan_bytes
    length = parse_plan(plan_bytes).weights[0].length
    wrong = plan_bytes.replace(length.to_bytes(8, "little"), (length - 2).to_bytes(8, "little"))
    with pytest.raises(PlanError, match="hold no number of tiles"):
        parse_plan(wrong)


def test_unpacking_keeps_what_kernels_read() -> None:
    packed = Case.of(linear(TILES)).packed.packed[0]
    parts = pack_tiles(packed)
    assert parts is not None
    data = bytearray(tile_bytes(90, len(parts[4])))
    for (at, length), part in zip(tile_parts(90, len(parts[4])), parts, strict=True):
        data[at : at + length] = part
    again = unpack_tiles(90, 200, bytes(data), len(parts[4]))
    live = live_mask(packed)
    assert (live_mask(again) == live).all()
    scales = [
        np.frombuffer(item.scales, np.uint8).reshape(*live.shape, 16) for item in (packed, again)
    ]
    assert (scales[0][live] == scales[1][live]).all()
