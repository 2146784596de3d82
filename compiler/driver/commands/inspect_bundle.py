"""`inspect`: what is inside a bundle, table by table."""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.manifest import ReleaseManifest
from compiler.contract.plan import Plan, PlanCall, parse_plan
from compiler.contract.plan_format import DTYPE_NAMES, Direction
from compiler.contract.selftest import parse_selftest
from compiler.contract.steering_points import SECTION, parse_steering_points
from compiler.driver.bundle_files import IR, read_bundle, read_text
from compiler.driver.commands.base import Answer, Command, Console, shown_bytes, table
from compiler.driver.explain.running_text import policy_lines, steering_lines
from compiler.driver.policy_stage import POLICY, policy_facts
from compiler.errors import UsageError

HEADING: Final = re.compile(r"^// ==== (\w+) ====$", re.MULTILINE)
MAP_CELLS: Final = 64
Sections = Mapping[str, bytes]
View = Callable[[ReleaseManifest, Sections, Plan], Answer]


def _sections(manifest: ReleaseManifest, _: Sections, plan: Plan) -> Answer:
    rows: list[Json] = [
        {
            "section": item.component,
            "bytes": item.size_bytes,
            "sha256": item.sha256,
            "planes": len(item.planes),
        }
        for item in manifest.sections
    ]
    head = [
        f"{manifest.model} {manifest.version} for {manifest.target}, plan ABI {manifest.plan_abi}",
        f"release {manifest.release_seq}, security epoch {manifest.security_epoch}, "
        f"verified on {manifest.verified_on}",
        f"needs {shown_bytes(manifest.requires.ram_bytes)} of memory, "
        f"{shown_bytes(manifest.requires.free_bytes)} of storage; "
        f"at most {plan.max_tokens} tokens a run",
    ]
    lines = table(
        [
            ("section", "bytes", "planes", "sha256"),
            *(
                (item.component, item.size_bytes, len(item.planes), item.sha256[:16])
                for item in manifest.sections
            ),
        ],
        right=frozenset({1, 2}),
    )
    return Answer([*head, *lines], {"manifest_sha256": manifest.sha256, "sections": rows})


def _plan(_: ReleaseManifest, __: Sections, plan: Plan) -> Answer:
    lines: list[str] = []
    document: dict[str, Json] = {}
    for program in plan.programs:
        ports = ", ".join(
            f"{port.role} {'<-' if port.direction is Direction.INPUT else '->'} b{port.buffer}"
            for port in program.ports
        )
        lines.append(f"{program.name}: {len(program.calls)} calls; {ports}")
        lines += [f"  {at:>4}  {call_text(plan, call)}" for at, call in enumerate(program.calls)]
        document[program.name] = [
            {
                "op": call.op.name,
                "inputs": list(call.inputs),
                "outputs": list(call.outputs),
                "weights": list(call.weights),
                "params": dict(call.params),
            }
            for call in program.calls
        ]
    return Answer(lines, document)


def call_text(plan: Plan, call: PlanCall) -> str:
    """Return one call as a line: results, operation, operands, weights, parameters."""
    outputs = ", ".join(f"b{at}[{_shape(plan, at)}]" for at in call.outputs)
    operands = [f"b{at}" if at >= 0 else "-" for at in call.inputs]
    operands += [f"w{at}" if at >= 0 else "-" for at in call.weights]
    params = " ".join(f"{name}={value:g}" for name, value in call.params.items())
    return f"{outputs} = {call.op.name}({', '.join(operands)}) {params}".rstrip()


def _shape(plan: Plan, at: int) -> str:
    buffer = plan.buffers[at]
    return f"{'T' if buffer.dynamic else buffer.rows}x{buffer.cols}"


def _weights(_: ReleaseManifest, __: Sections, plan: Plan) -> Answer:
    rows = [
        (
            f"w{at}",
            weight.kind.name.lower(),
            f"{weight.rows}x{weight.cols}",
            plan.sections[weight.section].name,
            weight.offset,
            weight.length,
        )
        for at, weight in enumerate(plan.weights)
    ]
    names = ("weight", "kind", "shape", "section", "offset", "bytes")
    return Answer(
        table([names, *rows], right=frozenset({4, 5})),
        [dict(zip(names, row, strict=True)) for row in rows],
    )


def _buffers(_: ReleaseManifest, __: Sections, plan: Plan) -> Answer:
    rows = [
        (
            f"b{at}",
            DTYPE_NAMES[buffer.dtype],
            _shape(plan, at),
            buffer.offset,
            buffer.length,
            ", ".join(_uses(plan, at)),
        )
        for at, buffer in enumerate(plan.buffers)
    ]
    names = ("buffer", "dtype", "shape", "offset", "bytes", "alive")
    return Answer(
        table([names, *rows], right=frozenset({3, 4})),
        [dict(zip(names, row, strict=True)) for row in rows],
    )


def _uses(plan: Plan, buffer: int) -> list[str]:
    """Return `program first-last` for every program that uses a buffer."""
    found = []
    for program in plan.programs:
        at = [
            number
            for number, call in enumerate(program.calls)
            if buffer in call.inputs or buffer in call.outputs
        ]
        at += [
            -1 if port.direction is Direction.INPUT else len(program.calls)
            for port in program.ports
            if port.buffer == buffer
        ]
        if at:
            found.append(f"{program.name} {max(min(at), 0)}-{max(at)}")
    return found


def _memory(_: ReleaseManifest, __: Sections, plan: Plan) -> Answer:
    cache = plan.kv.size_bytes if plan.kv else 0
    weights = sum(section.length for section in plan.sections)
    facts: dict[str, Json] = {
        "weights_bytes": weights,
        "arena_bytes": plan.arena_bytes,
        "kv_bytes": cache,
    }
    kind = plan.kv.kind.name.lower() if plan.kv else None
    lines = [
        f"{name.removesuffix('_bytes'):<8} {shown_bytes(int(str(n)))}" for name, n in facts.items()
    ]
    if kind is not None:
        lines[-1] += f" ({kind})"
    lines.append(f"arena, one column per {shown_bytes(max(1, plan.arena_bytes // MAP_CELLS))}:")
    order = sorted(range(len(plan.buffers)), key=lambda at: (plan.buffers[at].offset, at))
    for at in order:
        buffer = plan.buffers[at]
        lines.append(f"  b{at:<5} |{_bar(buffer.offset, buffer.length, plan.arena_bytes)}|")
    placed: list[Json] = [
        {"buffer": at, "offset": plan.buffers[at].offset, "bytes": plan.buffers[at].length}
        for at in order
    ]
    return Answer(lines, {**facts, "kv_kind": kind, "arena": placed})


def _bar(offset: int, length: int, total: int) -> str:
    first = offset * MAP_CELLS // max(1, total)
    last = max(first + 1, -(-(offset + length) * MAP_CELLS // max(1, total)))
    return " " * first + "#" * (last - first) + " " * (MAP_CELLS - last)


def _selftest(_: ReleaseManifest, sections: Sections, plan: Plan) -> Answer:  # noqa: ARG001
    selftest = parse_selftest(sections["selftest"])
    vectors: list[Json] = [
        {"name": vector.name, "runs": [run.program for run in vector.runs]}
        for vector in selftest.vectors
    ]
    lines = [f"{vector.name}: {len(vector.runs)} runs" for vector in selftest.vectors]
    lines += [f"layer {layer}: experts {list(ids)}" for layer, ids in selftest.experts.items()]
    experts: dict[str, Json] = {f"L{layer}": list(ids) for layer, ids in selftest.experts.items()}
    return Answer(lines, {"vectors": vectors, "experts": experts})


def _policy(_: ReleaseManifest, sections: Sections, plan: Plan) -> Answer:
    facts = policy_facts(sections[POLICY], plan, parse_selftest(sections["selftest"]), None)
    return Answer([*policy_lines(facts)][1:], facts)


def _steering(_: ReleaseManifest, sections: Sections, __: Plan) -> Answer:
    if SECTION not in sections:
        return Answer(["this bundle has no coefficients of steered routers"], None)
    found = asdict(parse_steering_points(sections[SECTION]))
    document: Json = {**found, "points": [dict(point) for point in found["points"]]}
    return Answer([*steering_lines(found)][1:], document)


VIEWS: Final[Mapping[str, View]] = MappingProxyType(
    {
        "sections": _sections,
        "plan": _plan,
        "weights": _weights,
        "buffers": _buffers,
        "memory": _memory,
        "selftest": _selftest,
        "policy": _policy,
        "steering": _steering,
    }
)


def ir_stages(text: str) -> dict[str, str]:
    """Split `ir.mlir` into its stages by their headings."""
    parts = HEADING.split(text)[1:]
    return dict(zip(parts[::2], (part.strip() + "\n" for part in parts[1::2]), strict=True))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="directory written by `compile`")
    parser.add_argument(
        "views", nargs="*", default=["sections"], metavar="VIEW", help=" ".join(VIEWS)
    )
    parser.add_argument(
        "--ir", metavar="STAGE", help="print the IR text after a stage, e.g. raised"
    )


def _run(options: argparse.Namespace, console: Console) -> Answer:  # noqa: ARG001 - one signature
    manifest, sections = read_bundle(options.bundle)
    if options.ir is not None:
        stages = ir_stages(read_text(options.bundle, IR))
        if options.ir not in stages:
            raise UsageError(
                f"there is no IR stage {options.ir!r}", hint=f"stages: {', '.join(stages)}"
            )
        return Answer(
            [stages[options.ir].rstrip()], {"stage": options.ir, "ir": stages[options.ir]}
        )
    unknown = [view for view in options.views if view not in VIEWS]
    if unknown:
        raise UsageError(f"there is no view {unknown[0]!r}", hint=f"views: {', '.join(VIEWS)}")
    plan = parse_plan(sections["plan"])
    answers = {view: VIEWS[view](manifest, sections, plan) for view in options.views}
    lines = [line for answer in answers.values() for line in answer.lines]
    return Answer(lines, {view: answer.document for view, answer in answers.items()})


COMMAND = Command(
    description="Show what is inside a bundle: " + ", ".join(VIEWS) + ", or the IR of a stage.",
    example="inspect build/my-model plan memory",
    add_arguments=_arguments,
    run=_run,
)
