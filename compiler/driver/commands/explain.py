"""`explain`: what was found in a model, what became of it, and what it costs."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from compiler.contract.plan import parse_plan
from compiler.contract.selftest import parse_selftest
from compiler.driver.bundle_files import read_bundle, read_report
from compiler.driver.cache import scratch_directory, write_atomic
from compiler.driver.commands.base import (
    Answer,
    Command,
    Console,
    UsageError,
    require_writable,
    shown_bytes,
    table,
)
from compiler.driver.explain.document import explain_document, segments_of
from compiler.driver.explain.picture import picture
from compiler.driver.explain.svg import svg_text
from compiler.driver.native_check import runs_here, take_times
from compiler.hardware.targets import find_target

WORST_WEIGHTS: Final = 8
TIMEOUT_SECONDS: Final = 120.0
_HEAD: Final = ("calls", "operation", "fused", "shape", "left out", "MFLOP", "moved", "share")
_RIGHT: Final = frozenset({5, 6, 7})


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="directory written by `compile`")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan into a file")
    parser.add_argument(
        "--measure", action="store_true", help="take the times of the calls again, on this machine"
    )


def _run(options: argparse.Namespace, console: Console) -> Answer:
    if options.svg is not None:
        require_writable(options.svg.parent)
    manifest, sections = read_bundle(options.bundle)
    report = read_report(options.bundle)
    explained = report.get("explained")
    if options.measure or explained is None:
        console.progress("times", 0.0)
        explained = _explained(sections, manifest.target, measure=options.measure)
    if options.svg is not None:
        write_atomic(options.svg, svg_text(picture(explained)).encode(), is_durable=False)
    lines = [
        f"{manifest.model} {manifest.version} for {manifest.target}, "
        f"{shown_bytes(manifest.total_bytes)}",
        f"verified on {manifest.verified_on}: {json.dumps(report.get('native_check', {}))}",
        *_stage_lines(report),
        *(line for name in explained["programs"] for line in _program_lines(name, explained)),
        *_sparsity_lines(report),
        *_weight_lines(report),
        f"experts per layer: {json.dumps(report.get('experts', {}))}",
        *(f"note: {note}" for note in report.get("notes", ())),
    ]
    return Answer(lines, {**report, "explained": explained})


def _explained(sections: Mapping[str, bytes], target_id: str, *, measure: bool) -> dict[str, Any]:
    target, times = find_target(target_id), None
    if measure:
        if not runs_here(target):
            raise UsageError(
                f"this machine cannot run {target_id}", hint="leave --measure out: the cost model"
            )
        with scratch_directory() as folder:
            times = take_times(folder, sections, TIMEOUT_SECONDS)
    selftest = parse_selftest(sections["selftest"])
    return dict(explain_document(parse_plan(sections["plan"]), target, selftest, times))


def _stage_lines(report: Mapping[str, Any]) -> Iterator[str]:
    for row in report.get("stages", ()):
        yield f"  {row['name']:<10} {row['seconds']:>8.3f} s{'  cached' * row['cached']}"


def _program_lines(name: str, explained: Mapping[str, Any]) -> list[str]:
    program = explained["programs"][name]
    taken = program["measured_us"]
    rows: list[tuple[str, ...]] = [_HEAD]
    for part in segments_of(program):
        for at in range(part.first, part.first + part.length):
            calls = program["calls"][at : part.end : part.length]
            rows.append(_row(calls, part.repeats))
    saved = 1 - program["flops"] / max(1, program["dense_flops"])
    return [
        "",
        f"program {name}, {program['tokens']} tokens behind {program['past_rows']} rows: "
        f"{program['flops'] / 1e6:.2f} MFLOP, {saved:.1%} less than dense; "
        f"{shown_bytes(program['moved_bytes'])} moved, dense {shown_bytes(program['dense_bytes'])}"
        + (f"; {taken / 1e3:.3f} ms in calls" if taken is not None else ""),
        f"shares of time: {explained['shares']}",
        *table(rows, right=_RIGHT),
    ]


def _row(calls: Sequence[Mapping[str, Any]], repeats: int) -> tuple[str, ...]:
    call = calls[0]
    key = "expected_ratio" if call["measured_ratio"] is None else "measured_ratio"
    sparsity = call["sparsity"]
    left_out = ""
    if sparsity is not None:
        left_out = f"{sparsity['kept']} of {sparsity['of']} {sparsity['kind']}"
    number = f"{call['call']}" + (f" x{repeats}" if repeats > 1 else "")
    return (
        number,
        call["title"] + (" (reference)" if call["is_reference"] else ""),
        ", ".join(call["fused"]),
        call["shape"],
        left_out,
        f"{sum(item['flops'] for item in calls) / 1e6:.3f}",
        shown_bytes(sum(item["moved_bytes"] for item in calls)),
        f"{sum(item[key] for item in calls):.1%}",
    )


def _sparsity_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say which zeros were found in each program, and where they save work."""
    for name, found in report.get("sparsity", {}).items():
        tensors, sources = found["tensors"], found["sources"]
        if not tensors and not sources:
            continue
        yield ""
        yield f"sparsity of program {name}: {len(sources)} sources, {len(tensors)} tensors"
        for source in sources:
            yield f"  source {source['number']}: {source['kind']}, {source['granularity']}"
        for row in tensors:
            yield (
                f"  {row['value']}: {row['level']}, {row['granularity']}, density "
                f"{row['density_low']:.3f} to {row['density_high']:.3f}, "
                f"{row['zeros']} of {row['elements']} proved zero"
            )
        for row in found["operations"]:
            yield (
                f"  {row['operation']}: at most {row['multiply_adds_most']} of "
                f"{row['multiply_adds_dense']} multiply-adds, {row['why']}"
            )


def _weight_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    for row in report.get("explain", ()):
        size = f"{row['weight_bytes']:>9} B"
        yield f"  {row['operation']:<14} {row['kernel']:<42} {size}  {row['why']}"
    worst = sorted(report.get("sqnr_db", {}).items(), key=lambda item: item[1])
    for name, decibel in worst[:WORST_WEIGHTS]:
        yield f"  {name:<24} {decibel:>6.2f} dB"


COMMAND = Command(
    description=(
        "Say what was found in a model and what became of it: per call what is fused and left\n"
        "out and why that is allowed, FLOPs and bytes against dense, kernel, layout, and\n"
        "share of time - measured where the code ran, else the cost model's. Repeated layers are\n"
        "shown once."
    ),
    example="explain build/my-model --svg my-model.svg",
    add_arguments=_arguments,
    run=_run,
)
