"""Mutants in a process with a memory limit: a typed error or the exact bytes, nothing else."""

import base64
import json
import subprocess
import sys

import numpy as np
import pytest

from compiler.delta import EncodeOptions, SectionBytes, encode_delta
from compiler.delta.records import Replays
from compiler.kernels.program import CSR, TILES
from tests.unit.compiler.delta.bundles import (
    Bundle,
    draw_codes,
    edgecard_like,
    move_codes,
    pack_codes,
    section,
)
from tests.unit.compiler.delta.masked import bundle, masks
from tests.unit.compiler.delta.merged import merged


def _case() -> tuple[Bundle, Bundle]:
    """A bundle pair small enough that damage anywhere matters, with every kind of section."""
    rng = np.random.default_rng(20)
    old, new = edgecard_like(20, experts=2, weights=2048)
    code = rng.bytes(1500)
    old["kernels"] = SectionBytes(code)
    new["kernels"] = SectionBytes(code[:700] + b"?" + code[700:])
    new["plan"] = SectionBytes(bytes(range(200)) * 3)
    codes = draw_codes(rng, 20_000)
    old["weights.shared"] = section(("codes4", pack_codes(codes)))
    grown = np.concatenate([move_codes(rng, codes, 0.02), codes[:64]])
    new["weights.shared"] = section(("codes4", pack_codes(grown)))
    return old, new


def _newer_case() -> tuple[Bundle, Bundle, Replays]:
    """The same with what version 3 has: sections that are aligned, and one that is replayed."""
    rng = np.random.default_rng(21)
    pairs = [masks(rng, *shape, 0.1, 2)[:2] for shape in ((TILES, 64, 512), (CSR, 64, 256))]
    old, new, factors = merged(rng, rows=90, cols=150, rank=1, size=0.01)
    return (
        old | bundle([pair[0] for pair in pairs]),
        new | bundle([pair[1] for pair in pairs]),
        factors,
    )


def _fuzz(tmp_path, seed: int, count: int, *, newer: bool = False) -> dict[str, int]:
    if newer:
        old, new, replays = _newer_case()
        codecs = {"planes", "planes+lowrank", "aligned", "zstd_source"}
    else:
        (old, new), replays = _case(), {}
        codecs = {"planes", "zstd_source", "zstd", "bsdiff4"}
    encoded = encode_delta(old, new, EncodeOptions(chunk_bytes=1024), replays=replays)
    assert {row.codec for row in encoded.report.sections} == codecs
    case = {
        side: {name: base64.b64encode(part.data).decode() for name, part in bundle.items()}
        for side, bundle in (("old", old), ("new", new))
    }
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case | {"delta": base64.b64encode(encoded.data).decode()}))
    child = [sys.executable, "-m", "tests.unit.compiler.delta.fuzz_child", str(path)]
    done = subprocess.run(
        [*child, str(seed), str(count)], check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("newer", [False, True])
def test_it_survives_500_mutants(tmp_path, newer):
    seen = _fuzz(tmp_path, seed=0, count=500, newer=newer)
    assert sum(seen.values()) == 500
    assert "WRONG" not in seen
    assert seen.keys() >= {
        "contract.delta.format",
        "contract.delta.truncated",
        "contract.delta.limit",
        "contract.delta.base",
        "contract.delta.result",
    }


@pytest.mark.full
@pytest.mark.parametrize("newer", [False, True])
def test_it_survives_50_000_mutants(tmp_path, record_property, newer):
    seen = _fuzz(tmp_path, seed=1_000_000, count=50_000, newer=newer)
    for outcome, count in sorted(seen.items()):
        record_property(outcome, count)
    assert sum(seen.values()) == 50_000
    assert "WRONG" not in seen
