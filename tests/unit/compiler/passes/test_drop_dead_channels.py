"""Dead hidden channels go, and nothing that is computed changes."""

from pathlib import Path

import numpy as np
import pytest

from compiler.frontend import import_pipeline
from compiler.kernels.program import Module
from compiler.passes import pipeline as passes
from compiler.passes.drop_dead_channels import DropDeadChannels, silent_rows
from compiler.passes.pipeline import lower_pipeline
from compiler.simulator import Simulator
from tests.factories.onnx_blocks import DOMAIN, Block, GraphBuilder
from tests.factories.onnx_models import write_block
from tests.factories.onnx_runs import block_difference, block_rows, lowered

WIDTH = 32


def linear_block(dead_rows: int, unread: int, act: str = "Relu", bias: float = -0.5) -> Block:
    """A layer of 96 hidden channels: the first are always zero, the last are never read."""

    def build(b: GraphBuilder, x: str) -> str:
        random = np.random.default_rng(4)
        w_in, w_out = random.standard_normal((WIDTH, 96)), random.standard_normal((96, WIDTH))
        offsets = random.standard_normal(96)
        w_in[:, :dead_rows], offsets[:dead_rows] = 0, bias
        w_out[96 - unread :] = 0
        hidden = b.op("Add", b.op("MatMul", x, b.const(w_in)), b.const(offsets))
        hidden = b.op(act, hidden) if act else hidden
        return b.op("MatMul", hidden, b.const(w_out))

    return build


def expert_block(*dead: int) -> Block:
    """Experts of 96 channels; in expert e, `dead[e]` of them, spread out, are always zero."""

    def build(b: GraphBuilder, x: str) -> str:
        random = np.random.default_rng(5)
        w_in = random.standard_normal((len(dead), 96, WIDTH))
        w_out = random.standard_normal((len(dead), WIDTH, 96))
        for expert, count in enumerate(dead):
            places = random.permutation(96)[:count]
            w_in[expert, places[::2]] = 0
            w_out[expert][:, places[1::2]] = 0
        rows = b.op("Reshape", x, b.ints(-1, WIDTH))
        router = b.weight(len(dead), WIDTH)
        routed = (router, b.weight(len(dead)), b.const(0.5))
        index, gate = b.ops("MoERouter", rows, *routed, count=2, domain=DOMAIN, k=2)
        y = b.op("MoEExpert", rows, index, gate, b.const(w_in), b.const(w_out), domain=DOMAIN)
        return b.op("Reshape", y, b.ints(1, -1, WIDTH))

    return build


def shapes(module: Module) -> list[tuple[int, ...]]:
    return [weight.array.shape for weight in module.weights if weight.kind == "w4"]


def without_the_pass(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    stages = {
        name: tuple(one for one in stage if not isinstance(one, DropDeadChannels))
        for name, stage in passes.STAGES.items()
    }
    with monkeypatch.context() as changed:
        changed.setattr(passes, "STAGES", stages)
        return lower_pipeline(import_pipeline(directory)).module


@pytest.mark.parametrize(("dead_rows", "unread"), [(32, 0), (0, 32), (20, 12), (50, 46), (96, 0)])
def test_it_drops_silent_and_unread_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_rows: int, unread: int
) -> None:
    directory = write_block(tmp_path, linear_block(dead_rows, unread), width=WIDTH)
    left = 32 if dead_rows + unread > 32 else 64
    module = lowered(directory).module
    assert shapes(module) == [(left, WIDTH), (WIDTH, left)]
    whole = without_the_pass(directory, monkeypatch)
    assert shapes(whole) == [(96, WIDTH), (WIDTH, 96)]
    x = block_rows(directory, 7)
    found, wanted = (
        Simulator(one, mode="f64").run_arrays("forward", {"tensor": x})["tensor"]
        for one in (module, whole)
    )
    assert np.abs(found - wanted).max() <= 1e-6 * max(1.0, np.abs(wanted).max())


def test_it_keeps_what_is_not_proved_dead(tmp_path: Path) -> None:
    for name, block in {
        "few": linear_block(20, 11),
        "positive": linear_block(40, 0, bias=0.5),
        "sigmoid": linear_block(40, 0, act="Sigmoid", bias=0.0),
        "no act": linear_block(40, 0, act="", bias=-0.5),
    }.items():
        directory = write_block(tmp_path / name, block, width=WIDTH)
        assert shapes(lowered(directory).module) == [(96, WIDTH), (WIDTH, 96)], name
        assert block_difference(directory, tokens=5) < 1e-5


def test_it_shrinks_all_experts_of_a_layer_alike(tmp_path: Path) -> None:
    directory = write_block(tmp_path, expert_block(40, 64, 33, 96), width=WIDTH)
    module = lowered(directory).module
    assert shapes(module) == [(64, WIDTH), (WIDTH, 64)] * 4
    assert block_difference(directory, tokens=9) < 1e-5


def test_one_live_expert_keeps_the_layer_whole(tmp_path: Path) -> None:
    directory = write_block(tmp_path, expert_block(40, 31, 33, 64), width=WIDTH)
    assert shapes(lowered(directory).module) == [(96, WIDTH), (WIDTH, 96)] * 4


@pytest.mark.parametrize(
    ("act", "silent"), [("relu", [1, 1, 0]), ("silu", [0, 1, 0]), ("none", [0, 1, 0])]
)
def test_a_row_of_zeros_is_silent_if_its_bias_gives_zero(act: str, silent: list[int]) -> None:
    weight, bias = np.zeros((3, 4), np.float32), np.float32([-1, 0, 1])
    assert silent_rows(weight, bias, act).tolist() == [bool(one) for one in silent]
    assert silent_rows(weight, None, act).all()
    weight[:, 2] = np.float32(1e-30)
    assert not silent_rows(weight, bias, act).any()
