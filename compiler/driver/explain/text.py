"""A compile report as lines for a terminal; parts that a report does not have are left out."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any, Final

from compiler.driver.commands.base import shown_bytes, table
from compiler.driver.explain.document import segments_of
from compiler.driver.explain.sources import DEAD, FATES, FOLDED, IN_CALL

WORST_WEIGHTS: Final = 8
MAX_FUSED: Final = 36
MAX_SOURCE: Final = 44
_HEAD: Final = (
    *("calls", "operation", "stands for", "fused", "shape", "done", "MFLOP", "moved", "share"),
)
_RIGHT: Final = frozenset({6, 7, 8})


def explain_lines(report: Mapping[str, Any], explained: Mapping[str, Any]) -> Iterator[str]:
    """Yield everything that `explain` says below its heading.

    Args:
        report: The report beside a bundle.
        explained: Its document about calls, or one made again.
    """
    yield from _stage_lines(report)
    for name in explained["programs"]:
        yield from _program_lines(name, explained)
    yield from _fate_lines(explained)
    yield from _sparsity_lines(report)
    yield from _layout_lines(report)
    yield from _check_lines(report, explained)
    yield from _neuron_lines(report)
    yield from _removal_lines(report)
    yield from _memory_lines(report)
    yield from _index_lines(report)
    yield from _schedule_lines(report)
    yield from _routing_lines(report)
    yield from _band_lines(report)
    yield from _weight_lines(report)
    if experts := report.get("experts"):
        yield "experts per layer: " + ", ".join(
            f"{name} {count}" for name, count in experts.items()
        )
    yield from _note_lines(report)


def check_text(report: Mapping[str, Any]) -> str:
    """Return what the self-test of the compiled code came to, in words; empty without one."""
    check = report.get("native_check") or {}
    if "vectors" not in check:
        return ""
    wrong = check.get("failed_vectors", 0)
    outcome = f"{wrong} of them with other bits" if wrong else "every bit as in the simulator"
    return f"{check['vectors']} vectors in {check.get('runs', 0)} runs, {outcome}"


def _note_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the passes did; those that found nothing to do share a line."""
    notes = [note.partition(": ") for note in report.get("notes", ())]
    if report.get("constant_time"):  # what a pass found likely is not looked for
        notes = [note for note in notes if note[0] != "check-zeros"]
    busy = {name for name, _, rest in notes if rest != "0"}
    for name, colon, rest in notes:
        if rest != "0":
            yield f"note: {name}{colon}{rest}"
    if idle := dict.fromkeys(name for name, _, _ in notes if name not in busy):
        yield f"note: nothing to do for {', '.join(idle)}"


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


def _fate_lines(explained: Mapping[str, Any]) -> Iterator[str]:
    """Say what became of the files' nodes, and which nobody needs."""
    rows = explained.get("fates", ())
    if not rows:
        return
    total = {fate: sum(row[fate] for row in rows) for fate in FATES}
    yield ""
    yield (
        f"nodes of the files: {total[IN_CALL]} in calls, {total[FOLDED]} folded when compiling, "
        f"{total[DEAD]} dead"
    )
    why = Counter((node[4], node[2]) for node in explained["nodes"] if node[3] == DEAD)
    for (reason, operator), count in sorted(why.items()):
        yield f"  {count} x {operator}: {reason}"


def node_lines(explained: Mapping[str, Any], wanted: str) -> Iterator[str]:
    """Say what became of every node whose name contains `wanted`."""
    places: defaultdict[int, list[str]] = defaultdict(list)
    for name, program in explained["programs"].items():
        for call in program["calls"]:
            for number in call.get("nodes", ()):
                places[number].append(f"{name} call {call['call']} ({call['title']})")
    for number, (component, name, operator, fate, why) in enumerate(explained.get("nodes", ())):
        if wanted in name:
            found = ", ".join(places[number]) if fate == IN_CALL else f"{fate}: {why}"
            yield f"{component} {operator} {name}: {found}"


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
        shorten(call.get("source", ""), MAX_SOURCE, placeholder=" …"),
        shorten(", ".join(call["fused"]), MAX_FUSED, placeholder=" …"),
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
        saving = [
            row
            for row in found["operations"]
            if row["multiply_adds_most"] < row["multiply_adds_dense"]
        ]
        for row in saving:
            yield (
                f"  {row['operation']}: at most {row['multiply_adds_most']} of "
                f"{row['multiply_adds_dense']} multiply-adds, {row['why']}"
            )


def _layout_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say how each weight with zeros is stored, and what every other layout would have cost."""
    for row in report.get("layouts", ()):
        rows, cols = row["shape"]
        yield ""
        yield (
            f"weight {rows} x {cols} of {row['operation']} in {', '.join(row['programs'])}, "
            f"{row['density']:.2%} not zero: {row['chosen']}"
        )
        for price in row["prices"]:
            spent = price["expected_us"]
            takes = "not measured" if spent is None else f"{spent:.2f} us"
            why = f", refused: {price['refused']}" if price["refused"] else ""
            space = price["workspace_bytes"]
            beside = f", workspace {shown_bytes(space)}" if space else ""
            yield f"  {price['layout']}: {takes}, {shown_bytes(price['bytes'])}{beside}{why}"


def _check_lines(report: Mapping[str, Any], explained: Mapping[str, Any]) -> Iterator[str]:
    """Say which calls look for zeros at run time, why, and how often they found them."""
    counts = {
        (name, call["call"]): call["check"]
        for name, program in explained["programs"].items()
        for call in program["calls"]
        if call.get("check")
    }
    grounds = {(row["program"], row["call"]): row for row in report.get("checks", ())}
    if counts or grounds:
        yield ""
        yield "run-time checks (sparse where the claim holds, dense otherwise, the same bits):"
    for (program, call), found in counts.items():
        why = grounds.get((program, call), {}).get("why", "in the plan")
        times = ""
        if found["held"] is not None:
            times = f"; held {found['held']} times, broken {found['broken']}"
        yield (
            f"  {program} {call}: at most {found['most_live_groups']} of {found['groups']} groups "
            f"of 32 live ({why}){times}"
        )
    for (program, call), row in grounds.items():
        if not row["most"]:
            yield f"  {program} {call}: none, {row['why']} ({row['held_ratio']:.0%} of rows)"


def _neuron_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say what is stored neuron by neuron and why, or that nothing may depend on values."""
    if report.get("constant_time"):
        yield ""
        yield "constant time: weights are read whole, nothing is checked; experts chosen do show"
    rows = report.get("neurons", ())
    if rows:
        yield ""
        yield "weights behind a ReLU (dead neurons are left out where it pays, the same bits):"
    for row in rows:
        zeros, gain = row["zero_ratio"], row["gain"]
        seen = "" if zeros is None else f"; {zeros:.0%} zeros, {gain:g} times as fast without them"
        stored = " and ".join(row["chosen"]) or "dense"
        yield f"  {row['operation']}, {len(row['weights'])} matrices: {stored} ({row['why']}{seen})"


def _removal_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say what went within the accuracy budget, what that saves, and what it costs."""
    found = report.get("removal")
    if not found:
        return
    before, after = found["parameters"]
    stored, left = (shown_bytes(size) for size in found["weight_bytes"])
    yield ""
    yield (
        f"removed within an accuracy budget of {found['accuracy_budget']:.2%}: "
        f"{before - after} of {before} weights, {left} instead of {stored}"
    )
    yield (
        f"  chosen on {found['chosen_by_questions']} calibration questions in "
        f"{len(found['trials'])} trials"
    )
    yield (
        f"  accuracy on {found['judged_questions']} other questions: "
        f"{found['accuracy_before']:.2%} before, {found['accuracy_after']:.2%} after, "
        f"asked about {len(found['looks'])} choices"
    )
    for name, (old, new) in found["flops"].items():
        yield f"  program {name}: {old / 1e6:.3f} MFLOP before, {new / 1e6:.3f} after"
    rows: list[tuple[object, ...]] = [
        (
            row["kind"],
            row["name"],
            f"{row['removed']} of {row['units']}",
            f"{row['output_error']:g}",
        )
        for row in found["sites"]
    ]
    head = ("units", "read by", "removed", "output error")
    yield from (f"  {line}" for line in table([head, *rows], right=frozenset({2, 3})))
    if found["structure_loss"]:
        yield f"  patterns of zeros rounded to tiles, each within {found['structure_loss']:g}"


def _weight_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    for row in report.get("explain", ()):
        size = f"{row['weight_bytes']:>9} B"
        yield f"  {row['operation']:<14} {row['kernel']:<42} {size}  {row['why']}"
    gains = [row["reduction"] for row in (report.get("calibration") or {}).values()]
    if gains:
        less = f"{sum(gains) / len(gains):.0%}"
        yield f"  scales searched on calibration rows: {len(gains)} matrices, error {less} less"
    worst = sorted(report.get("sqnr_db", {}).items(), key=lambda item: item[1])
    for name, decibel in worst[:WORST_WEIGHTS]:
        yield f"  {name:<24} {decibel:>6.2f} dB"


def _memory_lines(report: Mapping[str, Any]) -> Iterator[str]:
    memory = report.get("memory")
    if memory:
        yield ""
        yield (
            f"memory: arena {shown_bytes(memory['arena_bytes'])}, at least "
            f"{shown_bytes(memory['max_live_bytes'])} are needed; cache "
            f"{shown_bytes(memory['kv_bytes'])}"
            + (" as int8 codes" if memory.get("kv_kind") == "i8" else "")
        )
        for name, part in memory["programs"].items():
            if part.get("page_bytes"):
                yield (
                    f"  {name}: buffers and scheduled experts at most "
                    f"{shown_bytes(part['peak_bytes'])} at a time, "
                    f"{shown_bytes(part['page_bytes'])} of it experts of "
                    f"{shown_bytes(part['expert_bytes'])}"
                )


def _index_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say how many run-time index checks cannot fail, and why the others might."""
    found = report.get("index_checks")
    if not found:
        return
    yield (
        f"index checks: {found['internal_proved']} of {found['internal']} internal ones proved, "
        f"{found['external']} of indices that come with the inputs; all stay in the code"
    )
    for name, row in found["checks"].items():
        if row["verdict"] == "kept":
            yield f"  {name} kept: {row['reason']}"


def _schedule_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say which experts the tape prefetches and loads, and what that does on a device."""
    schedule = report.get("schedule")
    if not schedule:
        return
    yield ""
    yield f"schedule: {schedule['does']}"
    for name, steps in schedule["programs"].items():
        shown = [f"#{s['call']} {s['step']} {s['experts']} of {s['of']}" for s in steps]
        if shown:
            yield f"  {name}: {', '.join(shown)}"


def _routing_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say what calibration learned about the routers: bits, entropy bands, groups."""
    routing = report.get("routing")
    if not routing:
        return
    bits = {name: row["bits"] for name, row in routing.get("router_bits", {}).items()}
    yield f"router bits: {json.dumps(bits)}"
    for at, band in enumerate(routing.get("bands", ())):
        yield "entropy band " + f"{at}: " + ", ".join(f"{k} {v}" for k, v in band.items())
    yield f"expert groups: {routing.get('groups', 0)}"


def _band_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say which variants of a step run at which routing entropy, and what they cost in answers."""
    found = report.get("bands")
    if not found:
        return
    asked = found["questions"]
    together = (found["right"] - found["worse"] + found["better"]) / asked
    yield ""
    yield (
        f"entropy bands: {found['right'] / asked:.2%} of {asked} calibration questions right "
        f"without variants, {together:.2%} with them; {found['steps_narrow']} of "
        f"{found['steps']} steps take fewer experts"
    )
    ends = [f"to {row['low'] / 1000:.3f}" for row in found["bands"][1:]]
    for row, end in zip(found["bands"], [*ends, "on"], strict=True):
        right = (found["right"] - row["worse"] + row["better"]) / asked
        yield (
            f"  {row['low'] / 1000:.3f} {end} nats, {row['share'] / 10:.1f} % of the steps: "
            f"{row['program']}, top-{row['top_k']}, alone {right:.2%} right; {row['reason']}"
        )
