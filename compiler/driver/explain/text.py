"""A compile report as lines for a terminal; parts that a report does not have are left out."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any, Final

from compiler.driver.commands.base import shown_bytes, table
from compiler.driver.explain.document import segments_of
from compiler.driver.explain.found_text import found_lines
from compiler.driver.explain.running_text import running_lines
from compiler.driver.explain.sources import DEAD, FATES, FOLDED, IN_CALL

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
    yield from (f"caveat: {text}" for text in report.get("caveats", ()))
    for name in explained["programs"]:
        yield from _program_lines(name, explained)
    yield from _fate_lines(explained)
    yield from found_lines(report, explained)
    yield from running_lines(report)
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
