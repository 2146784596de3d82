"""Bundles for the tests of the delta codec: from seeds, like real updates."""

import io
from collections.abc import Mapping

import numpy as np

from compiler.contract.planes import Plane
from compiler.delta import (
    AppliedReport,
    EncodeOptions,
    MemorySections,
    SectionBytes,
    apply_delta,
    encode_delta,
    verify_sections,
)

Bundle = dict[str, SectionBytes]


def section(*parts: tuple[str, bytes]) -> SectionBytes:
    """Join (kind, bytes) parts to a section with planes."""
    data, planes = b"", []
    for kind, part in parts:
        planes.append(Plane(kind, len(data), len(part)))
        data += part
    return SectionBytes(data, tuple(planes))


def pack_codes(codes: np.ndarray) -> bytes:
    """Pack codes (n,) 0..15 two to a byte, low nibble first."""
    codes = codes.astype(np.uint8)
    return (codes[0::2] | (codes[1::2] << 4)).tobytes()


def draw_codes(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw codes (count,) distributed as quantised Gaussian weights are."""
    return np.clip(np.rint(rng.normal(8, 2.4, count)), 0, 15).astype(np.uint8)


def move_codes(rng: np.random.Generator, codes: np.ndarray, share: float) -> np.ndarray:
    """Move a share of the codes by one step, a few of those by two."""
    step = rng.choice([-2, -1, 1, 2], codes.size, p=[0.02, 0.48, 0.48, 0.02])
    step *= rng.random(codes.size) < share
    return np.clip(codes.astype(int) + step, 0, 15).astype(np.uint8)


def expert(
    rng: np.random.Generator, codes: np.ndarray, scales: np.ndarray, rows: np.ndarray
) -> SectionBytes:
    """One expert section: codes, scales, row scales and padding, as the compiler lays them out."""
    body = section(
        ("codes4", pack_codes(codes)),
        ("scales8", scales.astype(np.uint8).tobytes()),
        ("f32", rows.astype("<f4").tobytes()),
    )
    padding = -len(body.data) % 64
    if not padding:
        return body
    plane = Plane("raw", len(body.data), padding)
    return SectionBytes(body.data + bytes(padding), (*body.planes, plane))


def edgecard_like(seed: int, experts: int = 16, weights: int = 16_384) -> tuple[Bundle, Bundle]:
    """A small mixture of experts before and after a fine-tune, each moved by its own share."""
    rng = np.random.default_rng(seed)
    old: Bundle = {}
    new: Bundle = {}
    for number in range(experts):
        codes = draw_codes(rng, weights)
        scales = rng.integers(60, 256, weights // 32)
        rows = rng.random(128).astype("<f4")
        name = f"expert.L{number // 4}.E{number % 4}"
        old[name] = expert(rng, codes, scales, rows)
        moved = move_codes(rng, codes, rng.uniform(0.27, 0.41))
        new[name] = expert(rng, moved, scales, rows)
    return old, new


def memory(bundle: Mapping[str, SectionBytes]) -> MemorySections:
    """The bundle as a base."""
    return MemorySections({name: part.data for name, part in bundle.items()})


def run(
    data: bytes, base: Mapping[str, SectionBytes], *, reverse: bool = False
) -> tuple[AppliedReport, MemorySections]:
    """Apply and verify."""
    sink = MemorySections()
    report = apply_delta(memory(base), io.BytesIO(data), sink, reverse=reverse)
    verify_sections(report.header, sink, reverse=reverse)
    return report, sink


def assert_round_trip(old: Bundle, new: Bundle, options: EncodeOptions | None = None) -> bytes:
    """Encode, apply forwards and, where the file allows it, backwards; compare every byte."""
    encoded = encode_delta(old, new, options)
    report, made = run(encoded.data, old)
    changed = {name for name in new if name not in old or old[name].data != new[name].data}
    assert {result.component for result in report.sections} == changed
    for name in changed:
        assert made.section(name) == new[name].data
    if report.header.reversible:
        _, back = run(encoded.data, new, reverse=True)
        for name in changed & old.keys():
            assert back.section(name) == old[name].data
    return encoded.data
