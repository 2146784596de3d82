"""Dead heads leave projections, attention and cache, and nothing that is computed changes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from compiler.errors import UnsupportedOperatorError
from compiler.frontend import import_pipeline
from compiler.kernels.program import Module, Op
from compiler.passes import drop_dead_heads as heads
from compiler.passes import pipeline as passes
from compiler.passes.base import Pass
from compiler.passes.drop_dead_heads import DropDeadHeads
from compiler.passes.pipeline import LoweredPipeline, lower_pipeline
from compiler.quant.module import pack_module
from compiler.simulator import Simulator
from tests.factories.attention_blocks import Planted, attention_block, write_planted
from tests.factories.onnx_models import TinyShape, write_block
from tests.factories.onnx_runs import block_difference, block_rows, lowered

PLAIN = TinyShape(width=32, heads=4, kv_heads=4, hidden=32)
PACKED = TinyShape(width=128, heads=4, kv_heads=4, hidden=32, rope="turned")


def attentions(module: Module) -> list[tuple[int, int]]:
    return [
        (int(call.params["heads"]), int(call.params["kv_heads"]))
        for program in module.programs
        for call in program.calls
        if call.op is Op.ATTENTION
    ]


def without(directory: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Pass]) -> Module:
    stages = {
        name: tuple(one for one in stage if not isinstance(one, kind))
        for name, stage in passes.STAGES.items()
    }
    with monkeypatch.context() as changed:
        changed.setattr(passes, "STAGES", stages)
        return lower_pipeline(import_pipeline(directory)).module


def both(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Module, Module]:
    return lowered(directory).module, without(directory, monkeypatch, DropDeadHeads)


def bits(module: Module) -> Simulator:
    return Simulator(module, pack_module(module).packed)


def f32_only(directory: Path) -> Path:
    """Let the submission keep every weight as it is."""
    document = directory / "pipeline.json"
    document.write_text(document.read_text().replace("{", '{"quantise": "none", ', 1))
    return directory


BLOCKS: Mapping[str, tuple[Planted, tuple[int, int]]] = {
    "unread": (Planted(unread=(1,)), (3, 3)),
    "silent": (Planted(silent=(0, 3)), (2, 2)),
    "each one way": (Planted(unread=(2,), silent=(0,)), (2, 2)),
    "all": (Planted(unread=(0, 1, 2, 3)), (1, 1)),
    "a shared group": (Planted(heads=4, kv_heads=2, unread=(2, 3)), (2, 1)),
    "silent for a group": (Planted(heads=4, kv_heads=2, silent=(0,)), (2, 1)),
    "one query per group": (Planted(heads=4, kv_heads=2, unread=(0, 3)), (2, 2)),
    "one query of one group": (Planted(heads=4, kv_heads=2, unread=(0,)), (4, 2)),
    "two groups, uneven": (Planted(heads=6, kv_heads=3, unread=(0, 1, 3)), (4, 2)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_f32_heads_go_and_every_bit_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    planted, left = BLOCKS[name]
    directory = write_block(tmp_path, attention_block(planted), width=planted.shape.width)
    narrow, whole = both(f32_only(directory), monkeypatch)
    assert attentions(narrow) == [left]
    assert attentions(whole) == [(planted.heads, planted.kv_heads)]
    x = block_rows(directory, 5)
    found, wanted = (bits(one).run_arrays("forward", {"tensor": x}) for one in (narrow, whole))
    assert found["tensor"].tobytes() == wanted["tensor"].tobytes()
    assert block_difference(directory, tokens=7) < 1e-5


@pytest.mark.parametrize(
    ("planted", "left"),
    [
        (Planted(head_dim=32, silent=(1,), unread=(1,)), (3, 3)),
        (Planted(head_dim=16, silent=(0, 1), unread=(0, 1)), (2, 2)),
        (Planted(head_dim=32, heads=4, kv_heads=2, silent=(1,), unread=(2, 3)), (2, 1)),
    ],
)
def test_four_bit_heads_of_zero_values_go_and_every_bit_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Planted, left: tuple[int, int]
) -> None:
    directory = write_block(tmp_path, attention_block(planted), width=planted.shape.width)
    narrow, whole = both(directory, monkeypatch)
    assert attentions(narrow) == [left]
    x = block_rows(directory, 5)
    found, wanted = (bits(one).run_arrays("forward", {"tensor": x}) for one in (narrow, whole))
    assert found["tensor"].tobytes() == wanted["tensor"].tobytes()


def test_four_bit_heads_that_nobody_reads_go_without_a_change_in_exact_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted(head_dim=32, unread=(2,))
    directory = write_block(tmp_path, attention_block(planted), width=planted.shape.width)
    narrow, whole = both(directory, monkeypatch)
    assert attentions(narrow) == [(3, 3)]
    x = {"tensor": block_rows(directory, 9)}
    exact = Simulator(whole, mode="f64").run_arrays("forward", x)["tensor"]
    found = Simulator(narrow, mode="f64").run_arrays("forward", x)["tensor"]
    assert np.abs(found - exact).max() <= 1e-12 * np.abs(exact).max()
    errors = [
        np.square(bits(one).run_arrays("forward", x)["tensor"] - exact).mean()
        for one in (narrow, whole)
    ]
    assert errors[0] <= 1.05 * errors[1]


def test_four_bit_columns_stay_whole_groups(tmp_path: Path) -> None:
    for unread, left in {(1,): 4, (1, 2): 2, (0, 1, 3): 2}.items():
        planted = Planted(head_dim=16, unread=unread)
        directory = write_block(tmp_path / str(unread), attention_block(planted), width=64)
        assert attentions(lowered(directory).module) == [(left, left)], unread


def answers(module: Module, shape: TinyShape) -> list[bytes]:
    """Return what a picture and two steps give, in bits."""
    running = bits(module)
    pixels = np.random.default_rng(2).integers(0, 256, (1, shape.side**2), np.uint8)
    made = [running.run_arrays("see", {"image": pixels})]
    for ids in ([2, 3, 4], [5]):
        at = np.arange(len(ids), dtype=np.int32)[:, None] + 16
        rows = np.array(ids, np.int32)[:, None]
        made.append(running.run_arrays("step", {"token_ids": rows, "positions": at}))
    return [value.tobytes() for found in made for _, value in sorted(found.items())]


def cache_of(pipeline: LoweredPipeline) -> int:
    assert pipeline.module.kv is not None
    return pipeline.module.kv.heads


@pytest.mark.parametrize("shape", [PLAIN, PACKED], ids=["f32", "four bits"])
def test_the_cache_loses_heads_that_are_dead_in_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: TinyShape
) -> None:
    directory = write_planted(tmp_path, shape, {"decoder": {0: (1,), 1: (3,)}})
    if shape is PLAIN:
        f32_only(directory)
    narrow, whole = both(directory, monkeypatch)
    assert narrow.kv is not None
    assert whole.kv is not None
    assert (narrow.kv.heads, whole.kv.heads) == (3, 4)
    assert answers(narrow, shape) == answers(whole, shape)
    stored = [sum(w.array.size for w in one.weights) for one in (narrow, whole)]
    assert stored[0] == stored[1] - 2 * 4 * shape.width * shape.head_dim


def test_a_layer_that_needs_all_heads_keeps_the_cache(tmp_path: Path) -> None:
    directory = write_planted(tmp_path, PLAIN, {"decoder": {0: (1, 2)}})
    pipeline = lowered(directory)
    assert cache_of(pipeline) == 4
    assert any(note == "drop-dead-heads: 0" for note in pipeline.notes)


def test_shared_keys_lose_queries_while_the_cache_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = TinyShape(width=32, heads=4, kv_heads=2, hidden=32)
    directory = write_planted(tmp_path, shape, {})
    assert cache_of(lowered(directory)) == 2
    directory = write_planted(tmp_path / "group", shape, {"decoder": {0: (0, 1), 1: (2, 3)}})
    narrow, whole = both(f32_only(directory), monkeypatch)
    assert narrow.kv is not None
    assert narrow.kv.heads == 1
    assert answers(narrow, shape) == answers(whole, shape)


def test_heads_that_also_score_tokens_stay(tmp_path: Path) -> None:
    """The vision's only attention gives its queries and keys to the pruning as well."""
    directory = write_planted(tmp_path, PLAIN, {"vision": {0: (2,)}})
    see = next(p for p in lowered(directory).module.programs if p.name == "see")
    first = next(call for call in see.calls if call.op is Op.ATTENTION)
    assert int(first.params["heads"]) == 4


def _first_heads(live: np.ndarray, groups: int, share: int) -> np.ndarray:
    """Keep the first heads, whatever they do."""
    return np.arange(groups)[:, None] * live.shape[1] + np.arange(share)[None]


def _dead_first(live: np.ndarray, groups: int, share: int) -> np.ndarray:
    return KEPT(~live, groups, share)


def _next_head(chosen: np.ndarray, width: int) -> np.ndarray:
    return np.roll(COLUMNS(chosen, width), 1)


def _one_fewer(site, live: np.ndarray, groups: int) -> tuple[int, int] | None:
    """Believe that a head less than are alive is enough."""
    found = LEAST(site, live, groups)
    return None if found is None else (groups, max(1, found[1] - 1))


def _whole_group(live: np.ndarray) -> np.ndarray:
    """Call a group dead if one of its heads is."""
    return np.repeat(live.all(axis=1), live.shape[1]).reshape(live.shape)


KEPT, COLUMNS, LEAST, LIVE = heads._kept, heads._columns, heads._least_share, heads._live
MUTANTS = {
    "the first heads stay": ("_kept", _first_heads),
    "dead heads stay": ("_kept", _dead_first),
    "columns of a neighbour": ("_columns", _next_head),
    "a live head too few": ("_least_share", _one_fewer),
    "a group dies of one head": (
        "_live",
        lambda module, ctx, sites: [
            (site, _whole_group(mask.reshape(site.groups, site.share)).reshape(-1))
            for site, mask in LIVE(module, ctx, sites)
        ],
    ),
    "every head is dead": (
        "_live",
        lambda module, ctx, sites: [(s, ~m | ~m.any()) for s, m in LIVE(module, ctx, sites)],
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_broken_pass_changes_what_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What the tests above compare tells every mutant of the pass from the pass."""
    planted = Planted(heads=6, kv_heads=3, unread=(0, 1, 2))
    directory = write_block(tmp_path, attention_block(planted), width=planted.shape.width)
    x = {"tensor": block_rows(f32_only(directory), 5)}
    narrow, whole = both(directory, monkeypatch)
    wanted = bits(whole).run_arrays("forward", x)["tensor"].tobytes()
    assert bits(narrow).run_arrays("forward", x)["tensor"].tobytes() == wanted
    attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(heads, attribute, mutant)
    broken = lowered(directory).module
    assert bits(broken).run_arrays("forward", x)["tensor"].tobytes() != wanted


def test_a_cache_that_shrinks_in_one_layer_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan holds one shape of cache: a pass that forgets it does not get a plan."""
    directory = write_planted(tmp_path, PLAIN, {"decoder": {0: (1, 2)}})
    monkeypatch.setattr(
        heads,
        "common_size",
        lambda sites, live: [(int(mask.any(axis=1).sum()), 1) for mask in live],
    )
    with pytest.raises(UnsupportedOperatorError, match="cache has another shape"):
        lowered(directory)
