"""`diff`: what changed between two bundles, and what the update between them will weigh."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.manifest import ReleaseManifest
from compiler.contract.plan import Plan, PlanProgram, parse_plan
from compiler.delta import SectionBytes, encode_delta, with_planes
from compiler.driver.bundle_files import bundle_replays, read_bundle
from compiler.driver.commands.base import Answer, Command, Console, shown_bytes, table
from compiler.driver.commands.inspect_bundle import call_text

MAX_PLAN_LINES: Final = 200
_FACTS: Final = ("model", "version", "target", "release_seq", "security_epoch", "plan_abi")
Bundle = tuple[ReleaseManifest, dict[str, bytes]]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, help="bundle directory that devices have")
    parser.add_argument("new", type=Path, help="bundle directory that they would get")


def _run(options: argparse.Namespace, console: Console) -> Answer:
    old, new = read_bundle(options.old), read_bundle(options.new)
    console.progress("sections", 0.0)
    facts = {
        name: [str(getattr(old[0], name)), str(getattr(new[0], name))]
        for name in _FACTS
        if getattr(old[0], name) != getattr(new[0], name)
    }
    sections = _section_rows(old, new)
    plan = plan_difference(parse_plan(old[1]["plan"]), parse_plan(new[1]["plan"]))
    console.progress("delta", 0.2)
    delta = encode_delta(_sections(old), _sections(new), replays=bundle_replays(options.new))
    report = delta.report
    total = sum(len(data) for data in new[1].values())
    update: dict[str, Json] = {
        "delta_bytes": len(delta.data),
        "full_bytes": total,
        "changed_codes": report.changed_codes,
        "compared_codes": report.total_codes,
        "changed_codes_ratio": report.changed_codes / report.total_codes
        if report.total_codes
        else 0,
    }
    lines = [f"{name}: {was} -> {now}" for name, (was, now) in facts.items()]
    lines += _section_lines(sections)
    lines += plan[:MAX_PLAN_LINES]
    lines.append(
        f"codes changed: {report.changed_codes} of {report.total_codes} in changed sections"
        f" ({float(str(update['changed_codes_ratio'])):.2%})"
    )
    lines.append(
        f"predicted delta: {shown_bytes(len(delta.data))} of {shown_bytes(total)}"
        f" ({len(delta.data) / total:.2%})"
    )
    document: dict[str, Json] = {
        "manifest": dict(facts),
        "sections": [
            dict(zip(("change", "section", "old_bytes", "new_bytes"), row, strict=True))
            for row in sections
        ],
        "plan": plan,
        "update": update,
    }
    return Answer(lines, document)


def _section_rows(old: Bundle, new: Bundle) -> list[tuple[str, str, int, int]]:
    before = {item.component: item for item in old[0].sections}
    after = {item.component: item for item in new[0].sections}
    rows = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was is not None and now is not None and was.sha256 == now.sha256:
            continue
        change = "added" if was is None else "removed" if now is None else "changed"
        rows.append((change, name, was.size_bytes if was else 0, now.size_bytes if now else 0))
    return rows


def _section_lines(rows: Sequence[tuple[str, str, int, int]]) -> list[str]:
    if not rows:
        return ["no section changed"]
    shown = [(change, name, *map(shown_bytes, sizes)) for change, name, *sizes in rows]
    return table([("change", "section", "old", "new"), *shown], right=frozenset({2, 3}))


def plan_difference(old: Plan, new: Plan) -> list[str]:
    """Return the calls that differ, `-` before and `+` after, under the names of their programs."""
    before = {program.name: program for program in old.programs}
    after = {program.name: program for program in new.programs}
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        was, now = _call_texts(old, before.get(name)), _call_texts(new, after.get(name))
        changed = [
            line
            for line in difflib.unified_diff(was, now, lineterm="", n=0)
            if not line.startswith(("---", "+++", "@@"))
        ]
        lines += [f"program {name}:", *(f"  {line}" for line in changed)] if changed else []
    return lines


def _call_texts(plan: Plan, program: PlanProgram | None) -> list[str]:
    return [call_text(plan, call) for call in program.calls] if program is not None else []


def _sections(bundle: Bundle) -> Mapping[str, SectionBytes]:
    manifest, data = bundle
    return with_planes(manifest.sections, data)


COMMAND = Command(
    description="Compare two bundles: sections, codes, plan, and the bytes of the delta update.",
    example="diff build/v1 build/v2 --json",
    add_arguments=_arguments,
    run=_run,
)
