"""What a report says of a bundle on a device: memory, kernels, experts, policy, entropy bands.

Lines for `explain` and `inspect`. What a report does not have gives no line.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from compiler.driver.commands.base import indented, shown_bytes, table

WORST_WEIGHTS: Final = 8
NATS: Final = 1000
"""Entropies in reports are thousandths of a nat."""
_KERNELS: Final = ("operation", "kernel", "weights", "because")
_CLASS: Final = ("calls", "weights read", "rows", "in this plan")
_SUBSTITUTES: Final = ("stands in", "right", "lost", "won", "bytes of a step")
_BANDS: Final = ("entropy, nats", "steps", "program", "experts", "right", "because")
_STEERING: Final = (
    *("pull", "protect", "margin", "lean", "experts a token", "misses"),
    *("lost", "won", "used"),
)
_SECOND: Final = frozenset({1})
_LEARNT: Final = ("entropy, nats", "steps", "experts that differ", "to prefetch")


def running_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a report beside a bundle."""
    yield from _memory_lines(report)
    yield from _index_lines(report)
    yield from _schedule_lines(report)
    yield from _routing_lines(report)
    yield from _band_lines(report)
    yield from steering_lines(report.get("steering"))
    yield from _substitute_lines(report.get("substitutes"))
    yield from policy_lines(report.get("policy"))
    yield from _kernel_lines(report)
    yield from _weight_lines(report)


def policy_lines(policy: Mapping[str, Any] | None) -> Iterator[str]:
    """Say how each class of calls runs at each density, and what the choice rests on.

    Args:
        policy: `policy_facts` of a report; None has no line, without `classes` only the head.
    """
    if not policy:
        return
    yield ""
    yield f"policy: {_grounds(policy)}"
    rows = policy.get("classes", ())
    if not rows:
        return
    yield from indented(table([(*_CLASS, *policy["densities"]), *map(_class_row, rows)]))
    yield (
        "  columns are densities of what is stored or, for checked calls, of the activations; * "
        "where this plan's calls are; ? left to the device to measure"
    )


def _grounds(policy: Mapping[str, Any]) -> str:
    if policy["fixed"]:
        return "fixed, the device measures and adapts nothing"
    error, doubts = policy["held_out_error"], f"{policy['cells_in_doubt']} of {policy['cells']}"
    rest = f"{doubts} classes are left to the device to measure"
    if error is None:
        return f"never measured on this target, a guess; {rest}"
    where = policy.get("measured_on")
    place = f" on {where}" if where else " on this target"
    return f"fitted to calls measured{place}, {error:.1%} off on others; {rest}"


def _class_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    calls = ", ".join(f"{name} {count}" for name, count in row["calls"].items())
    cells = (
        f"{name.lower().replace('_', ' ')}{'*' if used else ''}{'?' if doubted else ''}"
        for name, used, doubted in zip(row["variants"], row["used"], row["in_doubt"], strict=True)
    )
    return row["kind"].lower().replace("_", " "), row["size"], row["rows"], calls, *cells


def _kernel_lines(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (row["operation"], row["kernel"], shown_bytes(row["weight_bytes"]), row["why"])
        for row in report.get("explain", ())
    ]
    if rows:
        yield ""
        yield "kernels:"
        yield from indented(table([_KERNELS, *rows], right=frozenset({2})))


def _weight_lines(report: Mapping[str, Any]) -> Iterator[str]:
    gains = [row["reduction"] for row in (report.get("calibration") or {}).values()]
    if gains:
        less = f"{sum(gains) / len(gains):.0%}"
        yield f"  scales searched on calibration rows: {len(gains)} matrices, error {less} less"
    worst = sorted(report.get("sqnr_db", {}).items(), key=lambda item: item[1])[:WORST_WEIGHTS]
    if worst:
        yield ""
        yield "weights that four bits change most:"
        rows = [(name, f"{decibel:.2f} dB") for name, decibel in worst]
        yield from indented(table([("section#matrix", "signal to noise"), *rows], right=_SECOND))


def _memory_lines(report: Mapping[str, Any]) -> Iterator[str]:
    memory = report.get("memory")
    if memory:
        yield ""
        yield (
            f"memory: arena {shown_bytes(memory['arena_bytes'])}, at least "
            f"{shown_bytes(memory['max_live_bytes'])} are needed; key/value cache "
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
    kept: dict[str, list[str]] = {}
    for name, row in found["checks"].items():
        if row["verdict"] == "kept":
            kept.setdefault(row["reason"], []).append(name)
    for reason, names in kept.items():
        yield f"  kept, {reason}: {', '.join(_calls_of(names))}"


def _calls_of(names: Sequence[str]) -> Iterator[str]:
    """Yield `program calls 2, 9` for check ids `program#call.operand`."""
    calls: dict[str, list[str]] = {}
    for name in names:
        program, _, rest = name.partition("#")
        calls.setdefault(program, []).append(rest.partition(".")[0])
    for program, numbers in calls.items():
        yield f"{program} call{'s' * (len(numbers) > 1)} {' '.join(dict.fromkeys(numbers))}"


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
    """Say what calibration learned about the routers: bits, groups, experts by entropy."""
    routing = report.get("routing")
    if not routing:
        return
    bits = ", ".join(f"{name} {row['bits']}" for name, row in routing["router_bits"].items())
    if bits:
        yield f"router bits: {bits}"
    yield f"expert groups: {routing.get('groups', 0)}"
    bands = routing.get("bands", ())
    if not bands:
        return
    ends = [*(band["low"] for band in bands[1:]), None]
    rows = [
        (
            _span(band["low"], end),
            f"{band['share'] / 10:.1f} %",
            band["expected_experts"],
            band["prefetch_width"],
        )
        for band, end in zip(bands, ends, strict=True)
    ]
    yield ""
    yield "experts by routing entropy (what a device expects and prefetches):"
    yield from indented(table([_LEARNT, *rows], right=frozenset({1, 2, 3})))


def _span(low: int, end: int | None) -> str:
    return f"{low / NATS:.3f} {'on' if end is None else f'to {end / NATS:.3f}'}"


def _band_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say which variants of a step run at which routing entropy, and what they cost in answers."""
    found = report.get("bands")
    if not found:
        return
    asked, bands = found["questions"], found["bands"]
    together = (found["right"] - found["worse"] + found["better"]) / asked
    yield ""
    yield (
        f"entropy bands: {found['right'] / asked:.2%} of {asked} calibration questions right "
        f"without variants, {together:.2%} with them; {found['steps_narrow']} of "
        f"{found['steps']} steps take fewer experts"
    )
    ends = [*(band["low"] for band in bands[1:]), None]
    rows = [
        (
            _span(row["low"], end),
            f"{row['share'] / 10:.1f} %",
            row["program"],
            f"top-{row['top_k']}",
            f"{(found['right'] - row['worse'] + row['better']) / asked:.2%}",
            row["reason"],
        )
        for row, end in zip(bands, ends, strict=True)
    ]
    yield from indented(table([_BANDS, *rows], right=frozenset({1, 4})))


def steering_lines(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Say with which coefficients a device steers its routers, and what was judged."""
    if not found:
        return
    yield ""
    if "reason" in found:
        yield f"steered routers: no coefficients, because {found['reason']}"
        return
    yield (
        f"steered routers: {found['right'] / found['questions']:.2%} of {found['questions']} "
        f"calibration questions right and {found['misses']} experts loaded unsteered, with "
        f"{found['resident'] / 10:.0f} % of the experts in memory"
    )
    if "kept_from_base" in found:
        yield f"  judged on the base, from which {found['kept_from_base']} experts differ"
    uses = {found["pressed"]: "as memory gets short", found["always"]: "always"}
    rows = [
        (
            f"{row['pull'] / 1000:g}",
            row["protect"],
            f"{row['margin'] / 1000:g}",
            f"{row['lean'] / 1000:g}",
            f"{row['mean_k'] / 1000:.2f}",
            row["misses"],
            row["worse"],
            row["better"],
            uses.get(at, ""),
        )
        for at, row in enumerate(found["points"])
    ]
    yield from indented(table([_STEERING, *rows], right=frozenset(range(8))))


def _substitute_lines(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Say what may stand in for routed layers, what it costs in answers, and what was refused."""
    if not found:
        return
    yield ""
    if found["rows"]:
        asked, right = found["questions"], found["right"]
        yield f"without routers; with them {right / asked:.2%} of {asked} held-out questions right:"
        if "kept_from_base" in found:
            yield f"  fitted on the base, from which {found['kept_from_base']} experts differ"
        if found.get("fitted_for_base"):
            yield "  fitted for the base, judged again on this version's cards"
        planned = found.get("planned", {})
        rows = [
            (
                row["kind"],
                f"{(right - row['worse'] + row['better']) / asked:.2%}",
                row["worse"],
                row["better"],
                planned.get(row["kind"], ""),
            )
            for row in found["rows"]
        ]
        yield from indented(table([_SUBSTITUTES, *rows], right=frozenset(range(1, 5))))
    for kind, reason in found["refused"].items():
        yield f"no {kind}: {reason}"
