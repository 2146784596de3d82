"""Writes the delta vectors. Existing files are never changed: they are a promise to devices.

A good vector is a JSON object: `old` and `new` map a component to {`data`: base64, `planes`:
[[kind, offset, length]]}, `delta` is base64, `modes` lists the modes its records use. `bad.json`
holds {`why`, `code`, `delta`}: files that must end in the error of that code, and their base.

Run from the root of the repository: python -m tests.contract.vectors.delta.make_vectors
"""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compiler.contract.delta import parse_header, read_records
from compiler.delta import EncodeOptions, SectionBytes, encode_delta
from compiler.delta.lowrank import Factors
from compiler.kernels.program import COO, CSR, ELL, TILES
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

HERE = Path(__file__).parent


def streams() -> tuple[Bundle, Bundle, EncodeOptions]:
    """Every mode of the four streams, over three sections of two layouts."""
    rng = np.random.default_rng(101)
    codes = draw_codes(rng, 8192)
    moved = codes.copy()
    moved[:2048] += rng.choice([0, 1, 255], 2048, p=[0.84, 0.08, 0.08]).astype(np.uint8)
    moved[100] ^= 8
    moved[:2048] &= 15
    moved[2048:4096] = rng.permutation(codes[2048:4096])
    moved[4100:4104] = 15 - moved[4100:4104]
    scales = rng.integers(1, 256, 2048).astype(np.uint8)
    shifted = scales.copy()
    shifted[:1024] += rng.integers(0, 3, 1024).astype(np.uint8)
    shifted[1500] ^= 64
    rows = rng.random(512).astype("<f4")
    grown = rows.copy()
    grown[:256] *= np.float32(1.002)
    grown[300] = np.float32("nan")
    mask = rng.integers(0, 256, 3072).astype(np.uint8)
    flipped = mask.copy()
    flipped[:1024] ^= np.packbits(rng.random(8192) < 0.01)
    flipped[1024:2048] ^= rng.integers(0, 256, 1024).astype(np.uint8)
    flipped[3000] ^= 255

    def bundle(c: np.ndarray, s: np.ndarray, r: np.ndarray, m: np.ndarray) -> Bundle:
        half = len(c) // 2
        first, second = pack_codes(c[:half]), pack_codes(c[half:])
        return {
            "expert.L0.E0": section(("codes4", first), ("raw", m.tobytes())),
            "expert.L0.E1": section(("codes4", second), ("raw", m.tobytes()[::-1])),
            "weights.shared": section(("scales8", s.tobytes()), ("f32", r.tobytes())),
        }

    old, new = bundle(codes, scales, rows, mask), bundle(moved, shifted, grown, flipped)
    return old, new, EncodeOptions(chunk_bytes=1024)


def pieces(*, store_reverse: bool) -> tuple[Bundle, Bundle, EncodeOptions]:
    """Every mode of pieces: a section that is new, rebuilt, grown, emptied."""
    rng = np.random.default_rng(102)
    code = rng.bytes(1200)
    codes = draw_codes(rng, 20_000)
    grown = np.concatenate([move_codes(rng, codes, 0.04), codes[:64]])
    old = {
        "kernels": SectionBytes(code),
        "selftest": SectionBytes(b"vectors"),
        "weights.shared": section(("codes4", pack_codes(codes))),
    }
    new = {
        "kernels": SectionBytes(code[:500] + b"rebuilt" + code[500:]),
        "plan": SectionBytes(b"plan " * 40),
        "selftest": SectionBytes(b""),
        "weights.shared": section(("codes4", pack_codes(grown))),
    }
    return old, new, EncodeOptions(store_reverse=store_reverse)


def sparse() -> tuple[Bundle, Bundle, EncodeOptions]:
    """Few codes that changed, and blocks of 4 x 4 of them."""
    rng = np.random.default_rng(107)
    codes = pack_codes(draw_codes(rng, 49_152))
    moved = np.frombuffer(codes, np.uint8).copy()
    moved[rng.choice(16_384, 60, replace=False)] ^= (1 << 4 * rng.integers(0, 2, 60)).astype(
        np.uint8
    )
    halves = moved[16_384:].reshape(-1, 16)
    for block in rng.choice(len(halves), 20, replace=False):
        halves[block] ^= (rng.integers(1, 16, 16) << 4).astype(np.uint8)
    old, new = ({"expert.L0.E0": section(("codes4", part))} for part in (codes, moved.tobytes()))
    return old, new, EncodeOptions(chunk_bytes=16_384)


def aligned() -> tuple[Bundle, Bundle, EncodeOptions]:
    """Masks that changed, in all packed forms."""
    shapes = ((TILES, 64, 512), (ELL, 64, 128), (CSR, 512, 32), (COO, 64, 512))
    return _masks_changed(shapes, 0.2, store_reverse=False)


def elements() -> tuple[Bundle, Bundle, EncodeOptions]:
    """A mask of elements that changed, both ways."""
    return _masks_changed(((CSR, 64, 1024),), 0.1, store_reverse=True)


def _masks_changed(
    shapes: Sequence[tuple[str, int, int]], share: float, *, store_reverse: bool
) -> tuple[Bundle, Bundle, EncodeOptions]:
    rng = np.random.default_rng(105)
    pairs = [masks(rng, *shape, share, 2)[:2] for shape in shapes]
    old, new = bundle([pair[0] for pair in pairs]), bundle([pair[1] for pair in pairs])
    return old, new, EncodeOptions(store_reverse=store_reverse)


def replayed() -> tuple[Bundle, Bundle, dict[tuple[str, int], Factors]]:
    """A weight merged with factors by replay, and beside it one that was tuned."""
    return merged(np.random.default_rng(106), rows=90, cols=150, rank=1, size=0.01)


def experts() -> tuple[Bundle, Bundle, EncodeOptions]:
    """Eight small experts after a fine-tune, one of them untouched, with the default options."""
    old, new = edgecard_like(103, experts=8, weights=2048)
    new["expert.L1.E2"] = old["expert.L1.E2"]
    return old, new, EncodeOptions()


def bad(good: bytes) -> list[dict[str, str]]:
    """Damaged copies of a good file."""
    header = parse_header(io.BytesIO(good).read)
    first = header.header_length
    cases = [
        ("empty file", "truncated", b""),
        ("cut in the header", "truncated", good[:20]),
        ("cut in the table", "truncated", good[: first - 1]),
        ("cut between records", "truncated", good[:first]),
        ("cut in the last payload", "truncated", good[:-1]),
        ("a byte behind the end", "format", good + b"\0"),
        ("another magic", "format", b"SFD2" + good[4:]),
        ("another version", "version", good[:4] + b"\2\0" + good[6:]),
        ("an unknown flag", "format", good[:6] + b"\3\0" + good[8:]),
        ("a file of 2^63 bytes", "limit", good[:15] + b"\x80" + good[16:]),
        ("2^32-1 records", "limit", good[:16] + b"\xff" * 4 + good[20:]),
        ("2^32-1 sections", "limit", good[:20] + b"\xff" * 4 + good[24:]),
        ("a table of 4 GiB", "limit", good[:28] + b"\xff" * 4 + good[32:]),
        ("a damaged table", "format", good[:50] + b"\xff" * 8 + good[58:]),
        ("an unknown record kind", "format", good[:first] + b"\x09" + good[first + 1 :]),
        ("a mode of another kind", "format", good[: first + 1] + b"\x10" + good[first + 2 :]),
        ("a chunk of 4 GiB", "limit", good[: first + 14] + b"\xff" * 4 + good[first + 18 :]),
        ("a payload of 4 GiB", "limit", good[: first + 18] + b"\xff" * 4 + good[first + 22 :]),
        ("another old hash", "base", good[: first + 22] + bytes(16) + good[first + 38 :]),
        ("another new hash", "result", good[: first + 38] + bytes(16) + good[first + 54 :]),
    ]
    return [
        {"why": why, "code": f"contract.delta.{code}", "delta": base64.b64encode(data).decode()}
        for why, code, data in cases
    ]


def _bundle_json(bundle: Bundle) -> dict[str, object]:
    return {
        name: {
            "data": base64.b64encode(part.data).decode(),
            "planes": [[plane.kind, plane.offset, plane.length] for plane in part.planes],
        }
        for name, part in bundle.items()
    }


def _case(old: Bundle, new: Bundle, data: bytes) -> dict[str, object]:
    return {
        "old": _bundle_json(old),
        "new": _bundle_json(new),
        "delta": base64.b64encode(data).decode(),
        "modes": _modes(data),
    }


def _modes(data: bytes) -> list[str]:
    stream = io.BytesIO(data)
    records = read_records(stream.read, parse_header(stream.read))
    return sorted({record.mode.name for record, _ in records})


def _write(name: str, document: object) -> None:
    path = HERE / f"{name}.json"
    if path.exists():
        print(f"kept  {path.name}")
        return
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    print(f"wrote {path.name}")


def main() -> None:
    cases = {
        "streams": streams(),
        "pieces-forward": pieces(store_reverse=False),
        "pieces-both-ways": pieces(store_reverse=True),
        "experts": experts(),
        "sparse": sparse(),
        "aligned-forward": aligned(),
        "aligned-both-ways": elements(),
        "nothing-changed": ({}, {}, EncodeOptions()),
    }
    for name, (old, new, options) in cases.items():
        _write(name, _case(old, new, encode_delta(old, new, options).data))
    old, new, factors = replayed()
    data = encode_delta(old, new, replays=factors).data
    _write("replayed", _case(old, new, data))
    old, new = edgecard_like(104, experts=2, weights=1024)
    damaged = bad(encode_delta(old, new).data)
    _write("bad", {"old": _bundle_json(old), "cases": damaged})


if __name__ == "__main__":
    main()
