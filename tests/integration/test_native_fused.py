"""Operations with a fused neighbour: the bits of the simulator, and of the operations alone."""

import numpy as np
import pytest

from compiler.kernels.program import ABSENT, Act, ExpertAct, KvCache, Module, NormKind, Op
from tests.factories.kernels import Case, ids, native_targets, raw
from tests.factories.modules import ModuleBuilder

TOKENS = 8
WIDTH, HEADS, GROUPS, HEAD = 24, 3, 1, 8
EXPERTS, HIDDEN = 5, 20
Ports = tuple[dict[str, int], dict[str, int]]


class FusedBuilder(ModuleBuilder):
    """Builds the same little model twice: as single operations, and fused."""

    def __init__(self, seed: int, kv: KvCache | None = None) -> None:
        super().__init__(seed, TOKENS, kv)
        self.norm = [self.vector(WIDTH, offset=1.0), self.vector(WIDTH)]

    def rows(self, cols: int, dtype: str = "f32") -> int:
        return self.buffer(None, cols, dtype)


def norm_linear(kind: NormKind, op: Op, *, fused: bool) -> Module:
    b = FusedBuilder(3)
    x = b.rows(WIDTH)
    array = b.normal(17, WIDTH)
    weights = [b.weight(array, "w4" if op is Op.LINEAR else "f32"), b.vector(17)]
    norm = b.norm[: 2 if kind is NormKind.LAYER else 1]
    y, r = b.rows(17), b.rows(17)
    if fused:
        b.call(op, [x, r], [y], [*weights, *norm], act=Act.SILU, norm=kind + 1, eps=1e-5)
    else:
        h = b.call(Op.NORM, [x], [b.rows(WIDTH)], norm, kind=kind, eps=1e-5)
        b.call(op, [h, r], [y], weights, act=Act.SILU)
    b.program("run", {"x": x, "r": r}, {"y": y})
    return b.module()


def moe(kind: NormKind, act: ExpertAct, *, residual: bool, fused: bool) -> Module:
    b = FusedBuilder(4)
    x, index, gate, y = b.rows(WIDTH), b.rows(2, "i32"), b.rows(2), b.rows(WIDTH)
    norm = [b.norm[0], b.norm[1] if kind is NormKind.LAYER else ABSENT]
    router = [b.weight(b.normal(EXPERTS, WIDTH)), b.vector(EXPERTS)]
    wide = HIDDEN * (2 if act is ExpertAct.SWIGLU else 1)
    experts = []
    for expert in range(EXPERTS):
        section = f"expert.L0.E{expert}"
        experts += [b.w4(wide, WIDTH, section), b.w4(WIDTH, HIDDEN, section)]
    if fused:
        weights = [*norm, *router, *experts]
        params = {"k": 2, "order": 2, "act": act, "kind": kind, "eps": 1e-5}
        b.call(Op.MOE_LAYER, [x], [y, index, gate], weights, **params, residual=int(residual))
    else:
        h = b.call(Op.NORM, [x], [b.rows(WIDTH)], norm, kind=kind, eps=1e-5)
        b.call(Op.ROUTE, [h], [index, gate], router, k=2, order=2)
        mixed = b.rows(WIDTH) if residual else y
        b.call(Op.EXPERTS, [h, index, gate], [mixed], experts, act=act)
        if residual:
            b.call(Op.ADD, [x, mixed], [y])
    b.program("run", {"x": x}, {"y": y, "index": index, "gate": gate})
    return b.module()


def rope_attention(layout: str, layer: int, *, fused: bool) -> Module:
    """`layout` says how q, k and v lie in operands, e.g. "q kv"."""
    b = FusedBuilder(5, KvCache(1, GROUPS, HEAD, 32))
    widths = {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
    parts = [b.rows(sum(widths[p] for p in part)) for part in layout.split()]
    positions, y = b.rows(1, "i32"), b.rows(HEADS * HEAD)
    angle = np.arange(64)[:, None] * 0.3 ** np.arange(HEAD // 2)
    tables = [b.weight(f(angle).astype(np.float32)) for f in (np.cos, np.sin)]
    params = {"heads": HEADS, "kv_heads": GROUPS, "scale": 0.35, "causal": 1, "kv_layer": layer}
    if fused:
        absent = [ABSENT] * (3 - len(parts))
        b.call(Op.ATTENTION, [*parts, *absent, positions], [y], tables, **params)
    else:
        single = {}
        for part, buffer in zip(layout.split(), parts, strict=True):
            start = 0
            for name in part:
                cut = b.rows(widths[name])
                b.call(Op.COLS_SLICE, [buffer], [cut], start=start, count=widths[name])
                single[name] = cut
                start += widths[name]
        for name, heads in (("q", HEADS), ("k", GROUPS)):
            turned = b.rows(widths[name])
            b.call(Op.ROPE, [single[name], positions], [turned], tables, heads=heads)
            single[name] = turned
        b.call(Op.ATTENTION, [single[name] for name in "qkv"], [y], **params)
    b.program(
        "run", {f"x{n}": at for n, at in enumerate(parts)} | {"positions": positions}, {"y": y}
    )
    return b.module()


PAIRS = {
    **{
        f"norm-{kind.name}-{op.name}": tuple(norm_linear(kind, op, fused=f) for f in (True, False))
        for kind in NormKind
        for op in (Op.LINEAR, Op.LINEAR_F32)
    },
    **{
        f"moe-{kind.name}-{act.name}-{residual}": tuple(
            moe(kind, act, residual=residual, fused=f) for f in (True, False)
        )
        for kind, act, residual in (
            (NormKind.RMS, ExpertAct.RELU, True),
            (NormKind.LAYER, ExpertAct.SWIGLU, True),
            (NormKind.RMS, ExpertAct.SWIGLU, False),
        )
    },
    **{
        f"rope-{layout}-{layer}": tuple(
            rope_attention(layout, layer, fused=f) for f in (True, False)
        )
        for layout in ("q k v", "qkv", "q kv", "qk v")
        for layer in (-1, 0)
    },
}


def inputs(module: Module, tokens: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for role, at in module.programs[0].inputs.items():
        shape = (tokens, module.buffers[at].cols)
        found[role] = random.standard_normal(shape).astype(np.float32)
        if role == "positions":
            found[role] = ids(random.permutation(60)[:tokens])
    return found


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("name", PAIRS)
def test_fused_is_unfused_is_simulated(name: str, target: str) -> None:
    fused, unfused = (Case.of(module) for module in PAIRS[name])
    simulators = fused.simulator(), unfused.simulator()
    with fused.native(target) as one, unfused.native(target) as other:
        for run, tokens in enumerate((1, 5, TOKENS)):
            values = inputs(fused.module, tokens, run)
            expected = raw(other.run("run", values))
            assert raw(one.run("run", values)) == expected
            for simulator in simulators:
                assert raw(simulator.run("run", values)) == expected


def test_a_fused_layer_takes_fewer_calls() -> None:
    counts = {name: [len(m.programs[0].calls) for m in pair] for name, pair in PAIRS.items()}
    assert all(fused == 1 < unfused for fused, unfused in counts.values())
    assert counts["moe-RMS-RELU-True"] == [1, 4]


def row_scores(cols: int) -> Module:
    """ATTENTION_ROW over q and k in one operand (`cols` > 0) or in two."""
    b = FusedBuilder(6)
    y = b.buffer(7, 1)
    params = {"heads": 2, "scale": 0.5, "row": 3}
    if cols:
        b.call(Op.ATTENTION_ROW, [b.buffer(7, 3 * cols)], [y], cols=cols, **params)
        b.program("run", {"x": 1}, {"y": y})
    else:
        b.call(Op.ATTENTION_ROW, [b.buffer(7, 8), b.buffer(7, 8)], [y], **params)
        b.program("run", {"q": 1, "k": 2}, {"y": y})
    return b.module()


@pytest.mark.parametrize("target", native_targets())
def test_a_row_of_attention_reads_columns(target: str) -> None:
    packed, apart = Case.of(row_scores(8)), Case.of(row_scores(0))
    x = np.random.default_rng(8).standard_normal((7, 24)).astype(np.float32)
    halves = {"q": x[:, :8].copy(), "k": x[:, 8:16].copy()}
    with packed.native(target) as one, apart.native(target) as other:
        expected = raw(other.run("run", halves))
        assert raw(one.run("run", {"x": x})) == expected
    assert raw(packed.simulator().run("run", {"x": x})) == expected
