"""`compile`: a submission directory to a bundle directory."""

import argparse
from pathlib import Path
from shlex import quote
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.elements import WORKSPACE_BUDGET_BYTES
from compiler.contract.plan_format import KvKind
from compiler.driver.bundle_files import REPORT, read_bundle, read_report, write_bundle
from compiler.driver.cache import DEFAULT_LIMIT_BYTES, StageCache
from compiler.driver.commands.base import (
    Answer,
    Command,
    Console,
    require_writable,
    shown_bytes,
    size_bytes,
    table,
)
from compiler.driver.compile import compile_model
from compiler.driver.gain import AnswerScores
from compiler.driver.gain_stage import scores_in
from compiler.driver.limit_options import add_limit_options, limits_of
from compiler.driver.options import CompiledBundle, CompileOptions
from compiler.errors import UsageError
from compiler.frontend.pipeline_json import FILE_NAME
from compiler.hardware.targets import ALL_TARGETS

KV_KINDS: Final = {"f32": KvKind.F32, "int8": KvKind.I8}
_NEEDED: Final = (
    ("submission", "a submission", "name a directory with pipeline.json, as `import` writes it"),
    ("target", "--target", f"one of {', '.join(target.id for target in ALL_TARGETS)}"),
    ("out", "--out", "name a directory for the bundle"),
)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("submission", type=Path, nargs="?", help="directory with pipeline.json")
    parser.add_argument("--target", help="see the command `targets`")
    parser.add_argument("--out", type=Path, help="directory for the bundle")
    parser.add_argument("--model", default="model", help="name of the model (default: model)")
    parser.add_argument("--release", default="1", help="name of the version (default: 1)")
    parser.add_argument("--release-seq", type=int, default=1, help="release number (default: 1)")
    parser.add_argument("--security-epoch", type=int, default=0, help="default: 0")
    parser.add_argument("--base", type=Path, help="older bundle whose weight grids are kept")
    parser.add_argument("--cache", type=Path, help="directory for stage results")
    parser.add_argument(
        "--cache-limit",
        type=size_bytes,
        default=DEFAULT_LIMIT_BYTES,
        metavar="SIZE",
        help="what is kept there at most, e.g. 500M or 2G (default: 2G)",
    )
    parser.add_argument(
        "--cache-info", action="store_true", help="say what the cache holds; compiles nothing"
    )
    parser.add_argument(
        "--recheck",
        action="store_true",
        help="run the native self-test even if the same bytes passed it on this machine",
    )
    _plan_arguments(parser)
    add_limit_options(parser)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what changes the plan itself."""
    parser.add_argument(
        "--layout-workspace",
        type=size_bytes,
        default=WORKSPACE_BUDGET_BYTES,
        metavar="SIZE",
        help="what the layout of a weight may need at run time beside its operands (default: 2M)",
    )
    parser.add_argument(
        "--accuracy-budget",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="remove heads, channels and tiles that calibration finds to matter little, losing at "
        "most this share of the calibration questions, e.g. 0.003 (default: 0, lossless)",
    )
    parser.add_argument(
        "--kv",
        choices=KV_KINDS,
        default="f32",
        help="how keys and values are kept: int8 takes about a quarter of the memory and is faster "
        "over long contexts; it changes numbers a little (default: f32)",
    )
    parser.add_argument(
        "--constant-time",
        action="store_true",
        help="read every weight whole, check nothing at run time: time and accesses depend on no "
        "activation and no value of a weight; the choice of experts is not hidden",
    )
    parser.add_argument(
        "--no-substitutes",
        dest="substitutes",
        action="store_false",
        help="leave out what stands in for routed layers on the lowest rungs of a device and where "
        "a router is in trouble: a smaller bundle, compiled sooner",
    )


def _run(options: argparse.Namespace, console: Console) -> Answer:
    if options.cache_info:
        return _cache_info(options)
    _check(options)
    require_writable(options.out)
    base = read_bundle(options.base) if options.base else None
    bundle = compile_model(
        options.submission,
        CompileOptions(
            target=options.target,
            model=options.model,
            version=options.release,
            release_seq=options.release_seq,
            security_epoch=options.security_epoch,
            cache_dir=options.cache,
            cache_limit_bytes=options.cache_limit,
            recheck=options.recheck,
            layout_workspace_bytes=options.layout_workspace,
            limits=limits_of(options),
            accuracy_budget=options.accuracy_budget,
            kv=KV_KINDS[options.kv],
            constant_time=options.constant_time,
            substitutes=options.substitutes,
            base_sections=base[1] if base else None,
            base_planes={item.component: item.planes for item in base[0].sections}
            if base
            else None,
            base_answers=_base_answers(options.base),
            progress=console.progress,
        ),
    )
    write_bundle(bundle, options.out)
    return _answer(bundle, options.out)


def _base_answers(base: Path | None) -> AnswerScores | None:
    """Return the scores in the base's report; None without a report, and the gain is not judged."""
    if base is None or not (base / REPORT).exists():
        return None
    return scores_in(read_report(base))


def _answer(bundle: CompiledBundle, out: Path) -> Answer:
    manifest = bundle.manifest
    document: dict[str, Json] = {
        "model": manifest.model,
        "version": manifest.version,
        "target": manifest.target,
        "manifest_sha256": manifest.sha256,
        "sections": len(manifest.sections),
        "total_bytes": manifest.total_bytes,
        "verified_on": manifest.verified_on,
        "stages": bundle.report["stages"],
        "caveats": bundle.report["caveats"],
        "gain": bundle.report["gain"],
        "out": str(out),
    }
    lines = [
        f"{manifest.model} {manifest.version} for {manifest.target}: "
        f"{len(manifest.sections)} sections, {manifest.total_bytes} bytes, "
        f"verified on {manifest.verified_on}",
        f"manifest sha256 {manifest.sha256}",
        f"gain: {bundle.report['gain']['says']}",
        *(f"caveat: {text}" for text in bundle.report["caveats"]),
        f"next: python -m compiler explain {quote(str(out))}",
    ]
    return Answer(lines, document)


def _check(options: argparse.Namespace) -> None:
    """Refuse a line that lacks something, and a place for the bundle that is taken.

    Raises:
        UsageError: Names what to add or to change.
    """
    for name, shown, hint in _NEEDED:
        if getattr(options, name) is None:
            raise UsageError(f"compile needs {shown}", hint=hint)
    if options.submission.is_file():
        raise UsageError(
            f"{options.submission} is a file, compile takes a submission directory",
            hint=f"make one: python -m compiler import {quote(str(options.submission))} --out DIR",
        )
    if (options.out / FILE_NAME).exists():
        raise UsageError(
            f"{options.out} holds a submission", hint="name another directory for the bundle"
        )


def _cache_info(options: argparse.Namespace) -> Answer:
    if options.cache is None:
        raise UsageError("--cache-info needs --cache", hint="name the directory of the cache")
    cache = StageCache(options.cache, options.cache_limit)
    uses = cache.use_by_stage()
    total = sum(use.size_bytes for use in uses.values())
    rows = [(name, use.entries, shown_bytes(use.size_bytes)) for name, use in uses.items()]
    lines = table(rows, right=frozenset({1, 2}))
    lines.append(f"{shown_bytes(total)} of {shown_bytes(cache.limit_bytes)} in {options.cache}")
    stages: dict[str, Json] = {
        name: {"entries": use.entries, "bytes": use.size_bytes} for name, use in uses.items()
    }
    return Answer(lines, {"stages": stages, "bytes": total, "limit_bytes": cache.limit_bytes})


COMMAND = Command(
    description="Compile a submission directory for one target and write the bundle.",
    example="compile examples/my-model --target x86-64-v3 --out build/my-model --cache build/cache",
    add_arguments=_arguments,
    run=_run,
)
