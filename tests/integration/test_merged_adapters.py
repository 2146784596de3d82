"""An adapter that is merged ships as its factors, from the compiler to the device."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builds.compile_runner.child import _base, _delta
from builds.compile_runner.protocol import DELTA_NAME, REPLAYS_NAME, REPORT_NAME
from compiler.contract.plan import parse_plan
from compiler.delta import encode_delta
from compiler.delta.replay_file import read_replays
from compiler.driver import cli
from compiler.driver.bundle_files import bundle_replays, write_bundle
from compiler.driver.compile import compile_model
from compiler.driver.options import CompiledBundle, CompileOptions
from compiler.emitters.plan import read_packed
from compiler.quant.merge import MergeBaseError
from compiler.quant.w4 import dequantise_w4, unpack_w4
from tests.factories.onnx_adapters import ask_to_merge
from tests.factories.onnx_blocks import Block, GraphBuilder
from tests.factories.onnx_models import write_block
from tests.integration.test_adapter_updates import applied, parts

WIDTH, RANK, SCALE = 512, 4, 0.5
SHARED = "weights.shared"
PLAIN = CompileOptions("x86-64-v2", "merged", "1", release_seq=1)


def factors(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A of (WIDTH, RANK) and B of (RANK, WIDTH), as ONNX has them."""
    rng = np.random.default_rng(seed)
    down = rng.standard_normal((WIDTH, RANK)).astype(np.float32) * 0.2
    return down, rng.standard_normal((RANK, WIDTH)).astype(np.float32) * 0.2


def model(adapter: int | None, width: int = WIDTH) -> Block:
    """One layer, alone or with a branch whose numbers `adapter` draws."""

    def build(b: GraphBuilder, x: str) -> str:
        y = b.op("MatMul", x, b.weight(width, width))
        if adapter is None:
            return y
        down, up = (b.const(part) for part in factors(adapter))
        branch = b.op("Mul", b.op("MatMul", b.op("MatMul", x, down), up), b.const(SCALE))
        return b.op("Add", y, branch)

    return build


def submission(folder: Path, adapter: int | None, width: int = WIDTH) -> Path:
    """A submission that asks for merged adapters."""
    return ask_to_merge(write_block(folder, model(adapter, width), width=width))


def on(base: CompiledBundle, number: int) -> CompileOptions:
    """Options of release `number` on a base."""
    sections, planes = _base(base.manifest, base.sections)
    return replace(
        PLAIN, version=str(number), release_seq=number, base_sections=sections, base_planes=planes
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> CompiledBundle:
    return compile_model(submission(tmp_path_factory.mktemp("first") / "s", None), PLAIN)


@pytest.fixture(scope="module")
def second(first: CompiledBundle, tmp_path_factory: pytest.TempPathFactory) -> CompiledBundle:
    return compile_model(submission(tmp_path_factory.mktemp("second") / "s", 1), on(first, 2))


def weight_of(bundle: CompiledBundle) -> np.ndarray:
    (packed,) = read_packed(parse_plan(bundle.sections["plan"]), bundle.sections).values()
    return dequantise_w4(unpack_w4(packed))


def test_the_plan_is_that_of_the_base(first: CompiledBundle, second: CompiledBundle) -> None:
    for name in ("plan", "kernels", "pipeline"):
        assert first.sections[name] == second.sections[name]
    assert first.sections[SHARED] != second.sections[SHARED]
    assert second.report["adapters"] == {f"{SHARED}#0": {"merged": "replay", "rank": RANK}}
    assert not first.replays


def share_kept(new: CompiledBundle, first: CompiledBundle, adapter: int) -> float:
    """How much of an adapter the change since `first` holds: 1 is all of it."""
    down, up = factors(adapter)
    wanted = (SCALE * (down @ up)).T
    change = weight_of(new) - weight_of(first)
    return float((change * wanted).sum() / np.square(wanted).sum())


def test_the_change_is_the_adapter(first: CompiledBundle, second: CompiledBundle) -> None:
    kept = share_kept(second, first, 1)
    assert 0.93 < kept < 1.01  # codes at the ends of their range go no further


def test_the_update_is_the_factors(
    first: CompiledBundle, second: CompiledBundle, tmp_path: Path
) -> None:
    plain = encode_delta(parts(first), parts(second))
    found = read_replays(second.replays)
    assert set(found) == {(SHARED, 0)}
    made = encode_delta(parts(first), parts(second), replays=found)
    codecs = {row.component: row.codec for row in made.report.sections}
    assert codecs[SHARED] == "planes+lowrank"
    assert 4 * len(made.data) < len(plain.data)
    assert applied(first, second.manifest, made.data, tmp_path) == dict(second.sections)


def test_a_delta_job_and_diff_use_them(
    first: CompiledBundle,
    second: CompiledBundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new, out = (tmp_path / name for name in ("old", "new", "out"))
    write_bundle(first, old)
    write_bundle(second, new)
    assert (new / REPLAYS_NAME).read_bytes() == second.replays
    _delta({"base": str(old), "new": str(new), "out": str(out)}, lambda _: None)
    rows = json.loads((out / REPORT_NAME).read_text())["sections"]
    assert {row["codec"] for row in rows if row["component"] == SHARED} == {"planes+lowrank"}
    assert cli.main(["diff", str(old), str(new), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["update"]["delta_bytes"] == (out / DELTA_NAME).stat().st_size
    write_bundle(first, new)
    assert bundle_replays(new) == {}


def test_another_release_has_another_dither_and_the_same_one_the_same_bytes(
    first: CompiledBundle, second: CompiledBundle, tmp_path: Path
) -> None:
    directory = submission(tmp_path / "s", 1)
    again, other = (compile_model(directory, on(first, number)) for number in (2, 3))
    assert again.sections == second.sections
    assert again.replays == second.replays
    assert other.sections[SHARED] != second.sections[SHARED]


def test_a_base_that_holds_another_weight_is_merged_in_f32(
    first: CompiledBundle, second: CompiledBundle, tmp_path: Path
) -> None:
    third = compile_model(submission(tmp_path / "s", 2), on(second, 3))
    assert third.report["adapters"][f"{SHARED}#0"]["merged"] == "f32"
    assert not third.replays
    assert 0.93 < share_kept(third, first, 2) < 1.01


def test_a_first_release_is_merged_in_f32(tmp_path: Path) -> None:
    bundle = compile_model(submission(tmp_path / "s", 1), PLAIN)
    assert bundle.report["adapters"] == {f"{SHARED}#0": {"merged": "f32", "rank": RANK}}
    assert not any(name.startswith("adapter.") for name in bundle.sections)


def test_a_base_of_another_shape_is_refused(tmp_path: Path) -> None:
    base = compile_model(submission(tmp_path / "b", None, width=256), PLAIN)
    with pytest.raises(MergeBaseError, match=r"512 x 512 cannot be merged: the base has 256 x 256"):
        compile_model(submission(tmp_path / "s", 1), on(base, 2))
