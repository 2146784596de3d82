"""What a report says was found in a model and what was chosen for it: zeros, layouts, checks.

Lines for `explain`; calls and values are named by the nodes of the ONNX file they stand for. What
a report does not have gives no line.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from compiler.driver.commands.base import indented, shown_bytes, table

_ZEROS: Final = ("value of", "known", "granularity", "not zero", "proved zero")
_SAVED: Final = ("node", "multiply-adds", "of dense", "because")
_PRICES: Final = ("layout", "expected", "stored", "workspace", "refused because")
_CHECKS: Final = ("call", "stands for", "claim", "because", "held", "broken")
_PACKED: Final = ("program", "rows", "readers", "dense", "half zero", "speed", "stored")
_NEURONS: Final = ("call", "stands for", "matrices", "zeros", "gain", "stored", "because")


def found_lines(report: Mapping[str, Any], explained: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines.

    Args:
        report: The report beside a bundle.
        explained: Its document about calls.
    """
    yield from _sparsity_lines(report)
    yield from _layout_lines(report)
    yield from _check_lines(report, explained)
    yield from _neuron_lines(report, explained)
    yield from _packed_lines(report)
    yield from _removal_lines(report)


def place_of(explained: Mapping[str, Any], program: str, call: int) -> tuple[str, str]:
    """Return a call as the tables name it, and the node that it stands for."""
    calls = explained["programs"].get(program, {}).get("calls", ())
    source = calls[call].get("source", "") if call < len(calls) else ""
    return f"{program} {call}", source


def _sparsity_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say which zeros were found in each program, and where they save work."""
    for name, found in report.get("sparsity", {}).items():
        tensors, sources = found["tensors"], found["sources"]
        if not tensors and not sources:
            continue
        yield ""
        yield f"sparsity of program {name}: {len(sources)} sources, {len(tensors)} tensors"
        yield from _source_lines(sources)
        rows = [
            (
                _node(row),
                row["level"],
                row["granularity"],
                f"{row['density_low']:.1%} to {row['density_high']:.1%}",
                f"{row['zeros']} of {row['elements']}",
            )
            for row in tensors
        ]
        yield from indented(table([_ZEROS, *rows], right=frozenset({3, 4})) if rows else ())
        saved = [
            (
                _node(row),
                row["multiply_adds_most"],
                row["multiply_adds_dense"],
                row["why"],
            )
            for row in found["operations"]
            if row["multiply_adds_most"] < row["multiply_adds_dense"]
        ]
        yield from indented(table([_SAVED, *saved], right=frozenset({1, 2})) if saved else ())


def _source_lines(sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [(_node(row), row["kind"], row["granularity"]) for row in sources]
    if rows:
        yield from indented(table([("zeros come from", "kind", "granularity"), *rows]))


def _node(row: Mapping[str, Any], unknown: str = "not recorded") -> str:
    """Return the node that a row is about; older compilers gave it a number only."""
    return str(row.get("source") or unknown)


def _layout_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say how each weight with zeros is stored, and what every other layout would have cost."""
    for row in report.get("layouts", ()):
        rows, cols = row["shape"]
        yield ""
        yield (
            f"weight {rows} x {cols} of {_node(row, row['operation'])} in "
            f"{', '.join(row['programs'])}, {row['density']:.2%} not zero: {row['chosen']}"
        )
        prices = [_price(price) for price in row["prices"]]
        yield from indented(table([_PRICES, *prices], right=frozenset({1, 2, 3})))


def _price(row: Mapping[str, Any]) -> tuple[str, ...]:
    spent, space = row["expected_us"], row["workspace_bytes"]
    takes = "not measured" if spent is None else f"{spent:.2f} us"
    beside = shown_bytes(space) if space else "-"
    return row["layout"], takes, shown_bytes(row["bytes"]), beside, row["refused"] or ""


def _check_lines(report: Mapping[str, Any], explained: Mapping[str, Any]) -> Iterator[str]:
    """Say which calls look for zeros at run time, why, and how often they found them."""
    counts = {
        (name, call["call"]): call["check"]
        for name, program in explained["programs"].items()
        for call in program["calls"]
        if call.get("check")
    }
    grounds = {(row["program"], row["call"]): row for row in report.get("checks", ())}
    rows: list[tuple[str, ...]] = []
    for (program, call), found in counts.items():
        why = grounds.get((program, call), {}).get("why", "in the plan")
        claim = f"at most {found['most_live_groups']} of {found['groups']} groups of 32 live"
        seen = ("-" if found[key] is None else f"{found[key]}" for key in ("held", "broken"))
        rows.append((*place_of(explained, program, call), claim, why, *seen))
    for (program, call), row in grounds.items():
        if not row["most"]:
            why = f"{row['why']} ({row['held_ratio']:.0%} of runs)"
            rows.append((*place_of(explained, program, call), "none", why, "-", "-"))
    if rows:
        yield ""
        yield "run-time checks (sparse where the claim holds, dense otherwise, the same bits):"
        yield from indented(table([_CHECKS, *rows], right=frozenset({4, 5})))


def _neuron_lines(report: Mapping[str, Any], explained: Mapping[str, Any]) -> Iterator[str]:
    """Say what is stored neuron by neuron and why, or that nothing may depend on values."""
    if report.get("constant_time"):
        yield ""
        yield "constant time: weights are read whole, nothing is checked; experts chosen do show"
    rows = [_neuron_row(row, explained) for row in report.get("neurons", ())]
    if rows:
        yield ""
        yield "weights behind a ReLU (dead neurons are left out where it pays, the same bits):"
        yield from indented(table([_NEURONS, *rows], right=frozenset({2, 3, 4})))


def _packed_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say which rows behind a ReLU could be a bitmap and values, and what would come of it."""
    rows = [
        (
            *(row["program"], f"{row['rows']} x {row['cols']}", str(row["readers"])),
            *(shown_bytes(row["dense_bytes"]), shown_bytes(row["packed_bytes"])),
            *(f"x {row['gain']:.2f}", "packed" if row["chosen"] else "dense"),
        )
        for row in report.get("packed_rows", ())
    ]
    if rows:
        yield ""
        yield "rows behind a ReLU (a bitmap and values where that is faster, the same bits):"
        yield from indented(table([_PACKED, *rows], right=frozenset({2, 3, 4, 5})))


def _neuron_row(row: Mapping[str, Any], explained: Mapping[str, Any]) -> tuple[str, ...]:
    place = (row["operation"], "")
    if "program" in row:
        place = place_of(explained, row["program"], row["call"])
    zeros, gain = row["zero_ratio"], row["gain"]
    seen = ("-", "-") if zeros is None else (f"{zeros:.0%}", f"x {gain:.2f}")
    stored = " and ".join(row["chosen"]) or "dense"
    return *place, str(len(row["weights"])), *seen, stored, row["why"].removeprefix("dense: ")


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
    yield from indented(table([head, *rows], right=frozenset({2, 3})))
    if found["structure_loss"]:
        yield f"  patterns of zeros rounded to tiles, each within {found['structure_loss']:g}"
