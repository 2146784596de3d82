"""`explain`: what was found in a model, what became of it, and what it costs."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from compiler.contract.errors import ContractError
from compiler.contract.manifest import ReleaseManifest
from compiler.contract.plan import parse_plan
from compiler.contract.selftest import parse_selftest
from compiler.driver.bundle_files import read_bundle, read_report
from compiler.driver.cache import scratch_directory, write_atomic
from compiler.driver.commands.base import (
    Answer,
    Command,
    Console,
    require_writable,
    shown_bytes,
)
from compiler.driver.explain.document import explain_document
from compiler.driver.explain.picture import picture
from compiler.driver.explain.sources import origins_of
from compiler.driver.explain.svg import svg_text
from compiler.driver.explain.text import check_text, explain_lines, node_lines
from compiler.driver.native_check import runs_here, take_times
from compiler.errors import UsageError
from compiler.hardware.targets import find_target

TIMEOUT_SECONDS: Final = 120.0


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="directory written by `compile`")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan into a file")
    parser.add_argument(
        "--node", metavar="TEXT", help="say only what became of nodes whose name contains TEXT"
    )
    parser.add_argument(
        "--measure", action="store_true", help="take the times of the calls again, on this machine"
    )


def _run(options: argparse.Namespace, console: Console) -> Answer:
    if options.svg is not None:
        require_writable(options.svg.parent)
    manifest, sections = read_bundle(options.bundle)
    report = read_report(options.bundle)
    try:
        return _explain(options, console, manifest, sections, report)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        # no digest covers the report: whoever edited it decides what stands there
        raise ContractError(
            f"the report in {options.bundle} is not as `compile` writes it"
            f" ({type(error).__name__}: {error})",
            hint="compile again; the cache makes it quick",
        ) from error


def _explain(
    options: argparse.Namespace,
    console: Console,
    manifest: ReleaseManifest,
    sections: Mapping[str, bytes],
    report: Mapping[str, Any],
) -> Answer:
    explained = report.get("explained")
    if options.measure or explained is None:
        console.progress("times", 0.0)
        explained = _explained(sections, manifest.target, explained, measure=options.measure)
    if options.svg is not None:
        write_atomic(options.svg, svg_text(picture(explained)).encode(), is_durable=False)
    if options.node is not None:
        return Answer(_nodes(explained, options.node), {**report, "explained": explained})
    lines = [
        f"{manifest.model} {manifest.version} for {manifest.target}, "
        f"{shown_bytes(manifest.total_bytes)}",
        ": ".join(
            text for text in (f"verified on {manifest.verified_on}", check_text(report)) if text
        ),
        *explain_lines(report, explained),
    ]
    if options.svg is not None:
        lines.append(f"the plan is drawn in {options.svg}")
    return Answer(lines, {**report, "explained": explained})


def _nodes(explained: Mapping[str, Any], wanted: str) -> list[str]:
    """Return lines about nodes of the files.

    Raises:
        UsageError: No node has such a name.
    """
    lines = list(node_lines(explained, wanted))
    if not lines:
        raise UsageError(
            f"no node of the model's files has {wanted!r} in its name",
            hint="take a part of a name as it stands in the ONNX file; names are kept by reports"
            " of this version of the compiler and later ones",
        )
    return lines


def _explained(
    sections: Mapping[str, bytes], target_id: str, old: Mapping[str, Any] | None, *, measure: bool
) -> dict[str, Any]:
    target, times = find_target(target_id), None
    if measure:
        if not runs_here(target):
            raise UsageError(
                f"this machine cannot run {target_id}", hint="leave --measure out: the cost model"
            )
        with scratch_directory() as folder:
            times = take_times(folder, sections, TIMEOUT_SECONDS)
    selftest = parse_selftest(sections["selftest"])
    origins = origins_of(old or {})
    return dict(explain_document(parse_plan(sections["plan"]), target, selftest, times, origins))


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
