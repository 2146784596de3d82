"""An adapter ships as its factors: from the compiler over manifest and delta to the device."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builds.compile_runner.child import _base
from compiler.contract.canonical import sha256_hex
from compiler.contract.manifest import ReleaseManifest, parse_manifest
from compiler.contract.protocol import DeltaOffer
from compiler.delta import SectionBytes, encode_delta
from compiler.driver.compile import compile_model
from compiler.driver.options import CompiledBundle, CompileOptions
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.update.apply import apply_offer
from tests.factories.onnx_blocks import Block, GraphBuilder
from tests.factories.onnx_models import write_block

WIDTH, RANK = 256, 4
MOST_OTHER_BYTES = 2048
"""What the self-test's vectors, header and records may take."""
PLAIN = CompileOptions("x86-64-v2", "adapted", "1", release_seq=1)
BASES = ("plan", "kernels", "pipeline", "weights.shared")


def adapted(factors: int) -> Block:
    """One layer with a low-rank branch; `factors` draws the branch alone."""

    def build(b: GraphBuilder, x: str) -> str:
        rng = np.random.default_rng(factors)
        base = b.op("MatMul", x, b.weight(WIDTH, WIDTH))
        down = b.const(rng.standard_normal((WIDTH, RANK)) * 0.1)
        up = b.const(rng.standard_normal((RANK, WIDTH)) * 0.1)
        return b.op("Add", base, b.op("MatMul", b.op("MatMul", x, down), up))

    return build


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompiledBundle, CompiledBundle]:
    """Two versions of a model that differ in the adapter; the second is compiled on the first."""
    folder = tmp_path_factory.mktemp("adapters")
    old = compile_model(write_block(folder / "1", adapted(1), width=WIDTH), PLAIN)
    sections, planes = _base(old.manifest, old.sections)
    options = replace(PLAIN, version="2", release_seq=2, base_sections=sections, base_planes=planes)
    return old, compile_model(write_block(folder / "2", adapted(2), width=WIDTH), options)


def parts(bundle: CompiledBundle) -> dict[str, SectionBytes]:
    """The sections as a builder stores them: by the manifest that a device will parse."""
    manifest = parse_manifest(bundle.manifest.to_bytes())
    return {
        item.component: SectionBytes(bundle.sections[item.component], item.planes)
        for item in manifest.sections
    }


def test_a_base_passes_its_adapters_on(bundles: tuple[CompiledBundle, CompiledBundle]) -> None:
    sections, planes = _base(bundles[0].manifest, bundles[0].sections)
    assert {"plan", "adapter.0", "weights.shared"} <= set(sections) == set(planes)
    assert planes["adapter.0"]


def test_an_update_of_the_adapter_is_its_factors(
    bundles: tuple[CompiledBundle, CompiledBundle], tmp_path: Path
) -> None:
    old, new = bundles
    for name in BASES:
        assert old.sections[name] == new.sections[name]
    assert old.sections["adapter.0"] != new.sections["adapter.0"]
    delta = encode_delta(parts(old), parts(new)).data
    factors = len(new.sections["adapter.0"])
    assert factors == 4 * 2 * RANK * WIDTH
    assert len(delta) < factors + MOST_OTHER_BYTES < len(new.sections["weights.shared"])
    made = applied(old, new.manifest, delta, tmp_path)
    assert made == dict(new.sections)


def applied(
    old: CompiledBundle, manifest: ReleaseManifest, delta: bytes, folder: Path
) -> dict[str, bytes]:
    """Apply a delta as a device does and return all sections of the new bundle."""
    store = ObjectStore(Disk(), folder, max_bytes=1 << 26)
    for data in (*old.sections.values(), delta):
        store.put(data, sha256_hex(data))
    offer = DeltaOffer(old.manifest.sha256, sha256_hex(delta), len(delta))
    apply_offer(store, offer, old.manifest, manifest)
    assert not list((folder / "partial").iterdir())
    return {
        item.component: bytes(store.read_verified(item.sha256, item.size_bytes))
        for item in manifest.sections
    }
