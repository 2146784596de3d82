"""What a release manager asks of a build, out of the compiler's report: tables, caveats. Pure.

How large is it and what is in it, which code runs and where it was checked, how calls are run, what
is left out when a step is easy, and what to mind. The rest of the report is a download. The report
comes from a worker and an older compiler may have written it: what is not there, or of another
form, is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dashboards.reports import Report, ReportTable, cell_text, items_in, report_of, text_in
from dashboards.templatetags.sparsefleet import NONE, percent

MAX_CAVEATS: Final = 20
MILLI: Final = 1000
"""Entropies are thousandths of a nat, shares thousandths of the whole."""
_PARTS: Final[tuple[tuple[str, str], ...]] = (
    ("expert.", "Experts, one section each"),
    ("weights.", "Weights that every input reads"),
    ("adapter.", "Adapters, factors only"),
    ("kernels", "Native code"),
    ("selftest", "What a device checks itself with"),
    ("plan", "Plan: which call follows which"),
    ("pipeline", "Words, prompts and limits"),
    ("policy", "Policy: how calls run"),
    ("bands", "Bands: when fewer experts do"),
    ("dense.", "Narrow layers for devices in need"),
)
_REST: Final = "What helps to load experts"
_UNCHECKED: Final = ("assembled", "structural", "unverified")
Document = Mapping[str, object]


def summary_of(report: object, *, verified_on: str) -> Report:
    """Return facts and tables of a finished build; nothing for one without a report.

    Args:
        report: As the worker stored it.
        verified_on: Where the code ran, as the bundle says; empty takes the report's word.
    """
    if not isinstance(report, Mapping):
        return Report((), ())
    where = verified_on or text_in(report, "verified_on")
    tables = (
        *_sizes(report),
        *_kernels(report, where),
        *_policy(report),
        *_bands(report),
        *_substitutes(report),
        *_stages(report),
    )
    return Report(tuple(_facts(report, where)), tables)


def caveats_of(report: object) -> tuple[str, ...]:
    """Return what to mind before a release, a sentence each."""
    found = report.get("caveats") if isinstance(report, Mapping) else None
    if not isinstance(found, list):
        return ()
    return tuple(cell_text("", item) for item in found[:MAX_CAVEATS] if isinstance(item, str))


def _facts(report: Document, where: str) -> Iterator[tuple[str, str]]:
    memory, check, removed = (_part(report, key) for key in ("memory", "native_check", "removal"))
    for name, key, source in (
        ("Download", "total_bytes", report),
        ("Memory of a run", "arena_bytes", memory),
        ("Key/value cache", "kv_bytes", memory),
    ):
        if source.get(key):
            yield name, cell_text(key, source[key])
    if where:
        yield "Code checked on", where
    if check.get("vectors"):
        wrong = check.get("failed_vectors") or "none"
        yield "Self-test", f"{text_in(check, 'vectors')} questions, {cell_text('', wrong)} differ"
    gain = _part(report, "gain")
    if gain.get("says"):
        yield "Gain over the base, after quantisation", text_in(gain, "says")
    if report.get("constant_time") is True:
        yield "Constant time", "no activation and no weight decides time or accesses"
    if removed:
        before, after = (removed.get(f"accuracy_{when}") for when in ("before", "after"))
        yield "Accuracy before and after removal", f"{_share(before)}, {_share(after)}"


def _sizes(report: Document) -> Iterator[ReportTable]:
    sizes = _part(report, "sizes")
    groups: dict[str, list[int]] = {}
    for name, size in sizes.items():
        if isinstance(size, int):
            groups.setdefault(_group(str(name)), []).append(size)
    whole = sum(map(sum, groups.values()))
    if not whole:
        return
    rows = sorted(groups.items(), key=lambda item: -sum(item[1]))
    yield ReportTable(
        title="What is in the bundle",
        columns=("Part", "Sections", "Size", "Of the bundle"),
        rows=tuple(
            (
                name,
                str(len(found)),
                cell_text("_bytes", sum(found)),
                percent(sum(found) / whole),
            )
            for name, found in rows
        ),
        rows_left_out=0,
        is_open=True,
    )


def _group(section: str) -> str:
    return next((words for start, words in _PARTS if section.startswith(start)), _REST)


def _stages(report: Document) -> tuple[ReportTable, ...]:
    kept = ("name", "seconds", "cached")
    rows = [{name: row.get(name) for name in kept} for row in items_in(report, "stages")]
    return report_of({"stages": rows}).tables


def _kernels(report: Document, where: str) -> Iterator[ReportTable]:
    rows = tuple(
        (
            text_in(row, "operation"),
            text_in(row, "kernel"),
            where or NONE,
            text_in(row, "calls"),
            cell_text("_bytes", row.get("weight_bytes")),
            text_in(row, "why"),
        )
        for row in items_in(report, "explain")
    )
    if rows:
        yield ReportTable(
            title="Kernels: which code does what",
            columns=("Operation", "Kernel", "Checked on", "Calls", "Weights read", "Why this one"),
            rows=rows,
            rows_left_out=0,
            is_open=True,
            note="" if where not in _UNCHECKED else "No machine here ran this code.",
        )


def _policy(report: Document) -> Iterator[ReportTable]:
    policy = _part(report, "policy")
    if not policy:
        return
    densities = policy.get("densities")
    names = [_bound(name) for name in densities] if isinstance(densities, list) else []
    rows = tuple(_class_row(row, len(names)) for row in items_in(policy, "classes"))
    yield ReportTable(
        title="Policy: how calls run on the device",
        columns=("Calls", "Weights read", "Rows", "In this plan", *names),
        rows=rows,
        rows_left_out=0,
        note=_grounds(policy)
        + (
            " The last columns are shares that are not zero: * where this plan is, ? the device"
            " measures."
            if rows
            else ""
        ),
    )


def _grounds(policy: Document) -> str:
    if policy.get("fixed") is True:
        return "Fixed: the device measures and adapts nothing."
    doubts = f"{text_in(policy, 'cells_in_doubt')} of {text_in(policy, 'cells')}"
    rest = f"{doubts} classes of calls are left to the device to measure."
    error = policy.get("held_out_error")
    if not isinstance(error, float):
        return f"Never measured on this target, a guess to begin with. {rest}"
    where = text_in(policy, "measured_on")
    return f"Fitted to calls measured on {where}, {percent(error)} off on others. {rest}"


def _class_row(row: Document, densities: int) -> tuple[str, ...]:
    used, doubted, variants = (_list(row, key) for key in ("used", "in_doubt", "variants"))
    cells = [
        cell_text("", name).lower().replace("_", " ") + "*" * (here is True) + "?" * (doubt is True)
        for name, here, doubt in zip(variants, used, doubted, strict=False)
    ]
    kind = text_in(row, "kind").lower().replace("_", " ")
    filled = (cells + [""] * densities)[:densities]
    return kind, _bound(row.get("size")), _bound(row.get("rows")), text_in(row, "calls"), *filled


def _bound(value: object) -> str:
    """Return the bound of a bucket as a page writes it."""
    return cell_text("", value).replace("<=", "≤ ").replace(">", "> ")


def _bands(report: Document) -> Iterator[ReportTable]:
    found = _part(report, "bands")
    bands, asked = items_in(found, "bands"), _number(found, "questions")
    if not bands or not asked:
        return
    right = _number(found, "right")
    together = right - _number(found, "worse") + _number(found, "better")
    lows = [_number(band, "low") / MILLI for band in bands]
    ends = [*(f"to {low:.3f}" for low in lows[1:]), "on"]
    yield ReportTable(
        title="Entropy bands: steps that take fewer experts",
        columns=("Entropy, nats", "Steps", "Program", "Experts", "Right answers", "Why"),
        rows=tuple(
            (
                f"{low:.3f} {end}",
                percent(_number(band, "share") / MILLI),
                text_in(band, "program"),
                f"top-{text_in(band, 'top_k')}",
                percent((right - _number(band, "worse") + _number(band, "better")) / asked),
                text_in(band, "reason"),
            )
            for band, low, end in zip(bands, lows, ends, strict=True)
        ),
        rows_left_out=0,
        note=f"{percent(right / asked)} of {asked} calibration questions right without, "
        f"{percent(together / asked)} with them.",
    )


def _substitutes(report: Document) -> Iterator[ReportTable]:
    found = _part(report, "substitutes")
    rows, asked = items_in(found, "rows"), _number(found, "questions")
    refused = _part(found, "refused")
    if not rows and not refused:
        return
    right, planned = _number(found, "right"), _part(found, "planned")
    kept = tuple(
        (
            text_in(row, "kind"),
            percent((right - _number(row, "worse") + _number(row, "better")) / max(1, asked)),
            text_in(planned, text_in(row, "kind")),
            "may stand in",
        )
        for row in rows
    )
    reasons = tuple((cell_text("", kind), NONE, NONE, text_in(refused, kind)) for kind in refused)
    yield ReportTable(
        title="Without routers: the lowest rungs, and what helps where a router is in trouble",
        columns=("Stands in", "Right answers", "Bytes of a step", "Why"),
        rows=(*kept, *reasons),
        rows_left_out=0,
        note=f"{percent(right / asked)} of {asked} held-out questions right with routers."
        if asked
        else "",
    )


def _part(report: Document, key: str) -> Document:
    found = report.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(row: Document, key: str) -> Sequence[object]:
    found = row.get(key)
    return found if isinstance(found, list) else ()


def _number(row: Document, key: str) -> int:
    found = row.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def _share(value: object) -> str:
    return percent(value) if isinstance(value, float) else NONE
