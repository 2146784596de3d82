"""What an update costs on the wire and on both ends, against every engine that we know.

    python -m benchmarks.delta [--check]

Updates of a synthetic expert of 13.6 MB (see `delta_cases`), EdgeCard's real consecutive versions
as the compiler makes them, and a model of 200 MB. Sizes are exact; processor time and memory are of
a process per run (`delta_engines`), one engine after the other on the same files, and every result
is applied and compared. Engines that are not installed have no row.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import delta_engines as engines
from benchmarks.delta_bound import entropy_bytes
from benchmarks.delta_cases import Case, Expert, merged_adapter, random_model
from benchmarks.delta_models import WHOLE, edgecard_claims
from benchmarks.runner import Claim, main
from compiler.contract.planes import Plane
from compiler.delta import SectionBytes, encode_delta
from compiler.delta.compare import bsdiff4_size

PEER: Final = "bsdiff4"
TIMED: Final = "all weights"
"""The update on which every engine runs, and time and memory are compared."""
ROUNDS: Final = 3
GAIN: Final = 1.1
"""Times smaller than bsdiff4 where at least `DENSE` of the codes changed."""
DENSE: Final = 0.02
DENSE_BOUND: Final = 1.05
STRUCTURED_BOUND: Final = 1.2
CPU_GAIN: Final = 15.0
REPLAY_GAIN: Final = 4.0
APPLY_KIB: Final = 16 << 10
DIFF_SECTIONS: Final = 3.0
WIRE: Final = {0.005: 2.8e6, 0.01: 5.0e6}
"""Bytes allowed for a model of 200 MB, by share of changed codes."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Files of one update."""

    path: Path

    def write(self, old: SectionBytes, new: SectionBytes) -> None:
        """Write both sections and their layout."""
        (self.path / "old").write_bytes(old.data)
        (self.path / "new").write_bytes(new.data)
        layout = [[plane.kind, plane.offset, plane.length] for plane in new.planes]
        (self.path / "planes").write_text(json.dumps(layout))

    def diff(self, engine: str) -> tuple[engines.Cost, int]:
        """Return what making a patch costs, and its bytes."""
        patch = self.path / f"patch-{engine}"
        cost = engines.run(engine, "diff", *self._files("new"), patch, self.path / "planes")
        return cost, patch.stat().st_size

    def apply(self, engine: str) -> engines.Cost:
        """Return what applying it costs.

        Raises:
            SystemExit: The result is wrong.
        """
        patch, made = self.path / f"patch-{engine}", self.path / "made"
        made.unlink(missing_ok=True)
        cost = engines.run(engine, "apply", *self._files("made"), patch, self.path / "planes")
        if made.read_bytes() != (self.path / "new").read_bytes():
            raise SystemExit(f"error: {engine} made other bytes")
        return cost

    def _files(self, new: str) -> tuple[Path, Path]:
        return self.path / "old", self.path / new


def measure() -> list[Claim]:
    """Measure everything; return the claims."""
    with tempfile.TemporaryDirectory() as name:
        return [
            *expert_claims(Folder(Path(name))),
            *replay_claims(),
            *edgecard_claims(Path(name)),
            *wire_claims(),
        ]


def expert_claims(folder: Folder) -> Iterator[Claim]:
    """Yield the claims about the synthetic expert."""
    expert = Expert()
    naive = 0
    for case in expert.cases():
        folder.write(expert.section, case.section)
        _, theirs = folder.diff(PEER)
        _, ours = folder.diff(engines.OURS)
        folder.apply(engines.OURS)
        name = case.name.replace(" ", "_").replace(",", "").replace("%", "percent")
        yield _smaller(f"delta.expert.{name}", ours, PEER, theirs, _must_gain(expert, case), case)
        bound = entropy_bytes(expert.parts, case.parts)
        limit = DENSE_BOUND if case.dense else STRUCTURED_BOUND
        yield _claim(
            f"delta.bound.{name}",
            ours,
            "bytes",
            "entropy",
            bound,
            limit * bound / ours,
            note=f"{ours / bound:.3f} times the entropy, at most {limit}",
        )
        if case.name == "all weights, fresh scales":
            naive = theirs
        if case.name == TIMED:
            yield _claim(
                "delta.whole",
                ours,
                "bytes",
                f"fresh scales, then {PEER}",
                naive,
                naive / ours,
                WHOLE,
                note=f"{ours / naive:.2f} of it, at most 0.70",
            )
            yield from _timed(folder, len(case.section.data))


def _must_gain(expert: Expert, case: Case) -> float:
    changed = (expert.parts.codes != case.parts.codes).mean()
    return GAIN if changed >= DENSE else 1.0


def _timed(folder: Folder, length: int) -> Iterator[Claim]:
    names = [name for name in engines.SETTINGS if engines.engine_version(name)]
    slow = {"detools", "xdelta3", "zstd", "hdiffpatch"}
    sizes, spent, held, applied = {}, {}, {}, {}
    for engine in names:
        rounds = 1 if engine in slow else ROUNDS
        made = [folder.diff(engine) for _ in range(rounds)]
        sizes[engine] = made[0][1]
        spent[engine] = median(cost.cpu_s for cost, _ in made)
        held[engine] = max(cost.rss_kib for cost, _ in made)
        applied[engine] = [folder.apply(engine) for _ in range(ROUNDS)]
    ours = engines.OURS
    for engine in names:
        if engine == ours:
            continue
        yield _smaller(f"delta.engine.{engine}", sizes[ours], engine, sizes[engine], 1.0)
        bar = CPU_GAIN if engine == PEER else None
        yield _times(f"delta.diff_cpu.{engine}", spent[ours], engine, spent[engine], bar)
        theirs = median(cost.cpu_s for cost in applied[engine])
        mine = median(cost.cpu_s for cost in applied[ours])
        yield _times(f"delta.apply_cpu.{engine}", mine, engine, theirs, None)
        yield _memory(f"delta.diff_memory.{engine}", held[ours], engine, held[engine])
        most = max(cost.rss_kib for cost in applied[engine])
        yield _memory(
            f"delta.apply_memory.{engine}", max(c.rss_kib for c in applied[ours]), engine, most
        )
    allowed = DIFF_SECTIONS * length / 1024
    yield _claim(
        "delta.diff_memory",
        held[ours] / 1024,
        "MiB",
        "three sections",
        allowed / 1024,
        allowed / max(1, held[ours]),
        1.0,
    )
    most = max(1, *(cost.rss_kib for cost in applied[ours]))
    yield _claim(
        "delta.apply_memory", most / 1024, "MiB", "the bar", APPLY_KIB / 1024, APPLY_KIB / most, 1.0
    )


def replay_claims(rows: int = 2048, cols: int = 4096) -> Iterator[Claim]:
    """Yield bytes of merged adapters: their factors replayed, against bsdiff4 on the result."""
    for rank in (8, 16):
        before, after, factors = merged_adapter(rows, cols, rank)
        old, new = {engines.COMPONENT: before}, {engines.COMPONENT: after}
        ours = len(encode_delta(old, new, replays={(engines.COMPONENT, 0): factors}).data)
        plain = len(encode_delta(old, new).data)
        theirs = bsdiff4_size(old, new)
        yield _claim(
            f"delta.replay.rank_{rank}",
            ours,
            "bytes",
            PEER,
            theirs,
            theirs / ours,
            REPLAY_GAIN,
            note=f"{rows} x {cols}; without the factors {plain} bytes",
        )


def wire_claims(megabytes: int = 200, sections: int = 16) -> Iterator[Claim]:
    """Yield the bytes of updates of a large model, sections encoded one after the other."""
    codes = megabytes * 2_000_000 // sections // 64 * 64
    for share, allowed in WIRE.items():
        total = 0
        for old, new in random_model(sections, codes, share):
            plane = (Plane("codes4", 0, len(old)),)
            total += len(
                encode_delta(
                    {engines.COMPONENT: SectionBytes(old, plane)},
                    {engines.COMPONENT: SectionBytes(new, plane)},
                ).data
            )
        yield _claim(
            f"delta.wire.{megabytes}MB.{share:.1%}",
            total,
            "bytes",
            "the bar",
            allowed,
            allowed / total,
            1.0,
        )


def _claim(
    name: str,
    value: float,
    unit: str,
    peer: str,
    theirs: float,
    ratio: float,
    bar: float | None = 1.0,
    note: str = "",
) -> Claim:
    version = engines.engine_version(peer) if peer in engines.SETTINGS else ""
    return Claim(name, value, unit, peer, version, theirs, ratio, bar, "host", note)


def _smaller(
    name: str, ours: int, engine: str, theirs: int, bar: float | None, case: Case | None = None
) -> Claim:
    note = engines.SETTINGS[engine] if case is None else f"{len(case.section.data)} bytes in full"
    return _claim(name, ours, "bytes", engine, theirs, theirs / ours, bar, note)


def _times(name: str, ours: float, engine: str, theirs: float, bar: float | None) -> Claim:
    return _claim(name, ours, "CPU s", engine, theirs, theirs / ours, bar)


def _memory(name: str, ours: int, engine: str, theirs: int) -> Claim:
    return _claim(name, ours / 1024, "MiB", engine, theirs / 1024, theirs / max(1, ours), None)


if __name__ == "__main__":
    sys.exit(main("delta", measure, sys.argv[1:]))
