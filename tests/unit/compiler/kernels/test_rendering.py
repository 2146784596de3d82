"""Rendered C: pruned, deterministic, named; which tile a target gets."""

import re

import pytest

from compiler.contract.operations import Op
from compiler.contract.plan_format import Status
from compiler.driver.explain.costs import F32_MACS_PER_CYCLE, W4_MACS_PER_CYCLE
from compiler.emitters.backends import render_kernels
from compiler.hardware.targets import (
    TARGETS,
    UnknownTargetError,
    best_target,
    find_target,
)
from compiler.kernels.naming import kernel_name, kernel_names
from compiler.kernels.registry import KERNELS
from compiler.kernels.select import TILES, select_tile

V1 = find_target("x86-64-v1")


def test_it_has_a_kernel_for_every_operation() -> None:
    assert set(KERNELS) == set(Op)
    source = render_kernels(V1, Op)
    for op, spec in KERNELS.items():
        assert f"int32_t {spec.function}(sf_context *ctx" in source
        assert f"[SF_Op_{op.name}] = {{{spec.function}, " in source


def test_it_renders_the_same_text_for_the_same_operations() -> None:
    some = [Op.LINEAR, Op.ADD, Op.NORM]
    assert render_kernels(V1, some) == render_kernels(V1, [*reversed(some), Op.ADD])


def test_it_leaves_out_what_is_not_used() -> None:
    source = render_kernels(V1, [Op.ADD])
    assert "sf_add(" in source
    for absent in ("sf_mul(", "sf_w4_product", "sf_conv2d", "sf_attention"):
        assert absent not in source
    assert "sf_w4_product" in render_kernels(V1, [Op.EXPERTS])


def test_it_numbers_the_enumerations_as_the_contract_does() -> None:
    source = render_kernels(V1, [Op.ADD])
    for status in Status:
        assert f"#define SF_Status_{status.name} {int(status)}\n" in source
    assert f"#define SF_Op_EXPERTS {int(Op.EXPERTS)}\n" in source


def test_it_leaves_no_hole_unfilled() -> None:
    for target in TARGETS:
        source = render_kernels(target, Op)
        assert "${" not in source
        assert "\n$" not in source


@pytest.mark.parametrize(
    ("target", "isa"),
    [
        ("x86-64-v1", "vec128"),
        ("x86-64-v2", "ssse3"),
        ("x86-64-v3", "avx2"),
        ("x86-64-v4-vnni", "avx512vnni"),
        ("aarch64", "vec128"),
        ("aarch64-dotprod", "dotprod"),
        ("aarch64-i8mm", "i8mm"),
        ("aarch64-sve2", "sve2"),
    ],
)
def test_it_selects_the_best_tile(target: str, isa: str) -> None:
    assert select_tile(find_target(target).isa).isa == isa


def test_it_prices_every_tile() -> None:
    for rates in (W4_MACS_PER_CYCLE, F32_MACS_PER_CYCLE):
        assert rates.keys() == {tile.isa for tile in TILES} - {"portable"}


def test_it_falls_back_to_the_portable_tile() -> None:
    assert select_tile(frozenset()).isa == "portable"
    assert TILES[-1].isa == "portable"


def test_it_names_kernels_by_the_grammar() -> None:
    tile = select_tile(frozenset({"avx2"}))
    assert kernel_name(Op.LINEAR, tile) == "sf_linear_p16_w4_4x16__avx2"
    assert kernel_name(Op.ROWS_SLICE, tile) == "sf_rowsslice_rm_f32_1x8__avx2"
    names = kernel_names(Op, tile)
    assert len(set(names)) == len(Op)
    assert names[0] in render_kernels(find_target("x86-64-v3"), Op)


def test_it_tells_tile_rows_as_the_template_has_them() -> None:
    for target in TARGETS:
        tile = select_tile(target.isa)
        assert f"#define SF_TILE_ROWS {tile.rows}\n" in render_kernels(target, [Op.LINEAR])


@pytest.mark.parametrize(
    ("target", "product", "pairs", "flips"),
    [
        ("aarch64", "", "", 0),
        ("aarch64-dotprod", "vdotq_s32", "", 1),
        ("aarch64-i8mm", "vusdotq_s32", "vusmmlaq_s32", 0),
        ("aarch64-sve2", "vusdotq_s32", "vusmmlaq_s32", 0),
    ],
)
def test_it_flips_codes_only_where_bytes_must_be_signed(
    target: str, product: str, pairs: str, flips: int
) -> None:
    source = render_kernels(find_target(target), [Op.LINEAR_W8])
    part = source[source.index("#define SF_W8_ROWS") : source.index("templates/w8.c.in")]
    assert re.findall(r"v(?:us)?dotq\w+", part)[:1] == ([product] if product else [])
    assert re.findall(r"v(?:us)?mmlaq\w+", part)[:1] == ([pairs] if pairs else [])
    assert part.count("0x80)") == flips


def test_it_finds_targets() -> None:
    assert len({target.id for target in TARGETS}) == len(TARGETS)
    with pytest.raises(UnknownTargetError) as caught:
        find_target("z80")
    assert "x86-64-v3" in caught.value.hint
    v2 = find_target("x86-64-v2")
    assert best_target("x86_64", v2.features | {"sse2", "mmx"}) == v2
    assert best_target("aarch64", frozenset({"asimd"})) == find_target("aarch64")
    assert best_target("riscv64", frozenset({"v"})) == find_target("riscv64-v")
    assert best_target("sparc64", frozenset()) is None
