"""EdgeCard's real consecutive versions, as the compiler makes them and as devices would get them.

Version 2 is compiled onto the scales of version 1, as the product does, and once more with scales
of its own: what a platform without a base would ship. Both answer the same questions. Called by
`benchmarks.delta`.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from benchmarks.runner import Claim
from compiler.delta import SectionBytes, encode_delta, with_planes
from compiler.delta.compare import bsdiff4_size
from compiler.driver.bundle_files import read_bundle
from compiler.driver.evaluate import evaluate_bundle
from compiler.driver.native_check import host_target
from examples.edgecard.materialise import materialise

ROOT: Final = Path(__file__).parents[1]
WHOLE: Final = 1 / 0.70
"""Times smaller than with fresh scales and bsdiff4 an update has to be."""
Bundle = Mapping[str, SectionBytes]


def edgecard_claims(folder: Path) -> Iterator[Claim]:
    """Yield bytes of EdgeCard's updates against bsdiff4, and what fresh scales would cost.

    Raises:
        SystemExit: It does not compile.
    """
    submissions = {name: materialise(name, folder / name) for name in ("v1", "v2", "v3")}
    first = _compiled(submissions["v1"], folder, "first")
    second = _compiled(submissions["v2"], folder, "second", first)
    third = _compiled(submissions["v3"], folder, "third", second)
    fresh = _compiled(submissions["v2"], folder, "fresh")
    old, new = _sections(first), _sections(second)
    ours = len(encode_delta(old, new).data)
    yield _claim("delta.edgecard.2", ours, "bsdiff4", bsdiff4_size(old, new), 1.0)
    last = _sections(third)
    yield _claim(
        "delta.edgecard.3",
        len(encode_delta(new, last).data),
        "bsdiff4",
        bsdiff4_size(new, last),
        1.0,
    )
    scores = [_accuracy(bundle, submissions["v2"]) for bundle in (second, fresh)]
    yield _claim(
        "delta.edgecard.whole",
        ours,
        "fresh scales, then bsdiff4",
        bsdiff4_size(old, _sections(fresh)),
        WHOLE,
        f"answers right {scores[0]:.1%} against {scores[1]:.1%} with fresh scales",
    )
    yield _claim("delta.edgecard.full", ours, "the whole bundle", _size(new), None)


def _compiled(submission: Path, folder: Path, name: str, base: Path | None = None) -> Path:
    target, out = host_target(), folder / name
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    command = [sys.executable, "-m", "compiler", "compile", str(submission), "--out", str(out)]
    command += ["--target", target.id, "--cache", str(folder / "cache")]
    command += ["--base", str(base)] if base else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: the compiler ended with {done.returncode}: {done.stderr}")
    return out


def _sections(bundle: Path) -> Bundle:
    manifest, data = read_bundle(bundle)
    return with_planes(manifest.sections, data)


def _size(bundle: Bundle) -> int:
    return sum(len(section.data) for section in bundle.values())


def _claim(
    name: str, ours: int, peer: str, theirs: int, bar: float | None, note: str = ""
) -> Claim:
    return Claim(name, ours, "bytes", peer, "", theirs, theirs / ours, bar, "host", note)


def _accuracy(bundle: Path, submission: Path) -> float:
    return evaluate_bundle(read_bundle(bundle)[1], submission).accuracy
