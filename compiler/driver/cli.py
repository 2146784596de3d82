"""The command line of the compiler: `python -m compiler`.

What a command produces goes to standard output; progress and errors go to standard error. An error
is one `error:` line and, where something helps, `hint:` lines.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from compiler.contract.errors import ContractError
from compiler.driver.bundle_files import read_bundle, read_report, write_bundle
from compiler.driver.compile import compile_model
from compiler.driver.evaluate import evaluate_bundle
from compiler.driver.limit_options import add_limit_options, limits_of
from compiler.driver.native_check import host_features
from compiler.driver.options import CompileOptions
from compiler.errors import CompilerError, UserModelError
from compiler.hardware.targets import TARGETS, UnknownTargetError

OK: Final = 0
USER_FAULT: Final = 1
BAD_ARGUMENTS: Final = 2
OUR_FAULT: Final = 3
_EPILOG: Final = (
    "exit status: 0 done, 1 the submission or bundle is at fault, 2 wrong arguments, 3 our fault"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        _COMMANDS[options.command](options)
        sys.stdout.flush()
    except UnknownTargetError as error:
        return _fail(error, error.hint, BAD_ARGUMENTS)
    except (UserModelError, ContractError) as error:
        return _fail(error, error.hint, USER_FAULT)
    except CompilerError as error:
        return _fail(error, error.hint, OUR_FAULT)
    except BrokenPipeError:  # the reader of our output left, e.g. `head`
        sys.stderr.close()
    except OSError as error:
        return _fail(error, "", OUR_FAULT)
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m compiler",
        description="Compile ONNX submissions into bundles for one target.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("compile", help="compile a submission directory", epilog=_EPILOG)
    build.add_argument("submission", type=Path, help="directory with pipeline.json")
    build.add_argument("--target", required=True, help="see the command `targets`")
    build.add_argument("--out", type=Path, required=True, help="directory for the bundle")
    build.add_argument("--model", default="model", help="name of the model (default: model)")
    build.add_argument("--release", default="1", help="name of the version (default: 1)")
    build.add_argument("--release-seq", type=int, default=1, help="release number (default: 1)")
    build.add_argument("--security-epoch", type=int, default=0, help="default: 0")
    build.add_argument("--base", type=Path, help="older bundle whose weight grids are kept")
    build.add_argument("--cache", type=Path, help="directory for stage results")
    add_limit_options(build)
    commands.add_parser("targets", help="list the targets")
    explain = commands.add_parser("explain", help="say how a bundle was made")
    explain.add_argument("bundle", type=Path, help="directory written by `compile`")
    evaluate = commands.add_parser("evaluate", help="ask a bundle an evaluation set")
    evaluate.add_argument("bundle", type=Path, help="directory written by `compile`")
    evaluate.add_argument("cards", type=Path, help="directory with evaluation.json and .npz")
    evaluate.add_argument("--set", default="evaluation", help="stem of the files")
    evaluate.add_argument("--cards", dest="most", type=int, default=0, help="at most so many")
    evaluate.add_argument("--simulator", action="store_true", help="instead of native code")
    return parser


def _compile(options: argparse.Namespace) -> None:
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
            base_sections=base[1] if base else None,
            base_planes={item.component: item.planes for item in base[0].sections}
            if base
            else None,
            limits=limits_of(options),
            progress=_show_progress,
        ),
    )
    write_bundle(bundle, options.out)
    _print(
        f"{bundle.manifest.model} {bundle.manifest.version} for {bundle.manifest.target}: "
        f"{len(bundle.manifest.sections)} sections, {bundle.manifest.total_bytes} bytes, "
        f"verified on {bundle.manifest.verified_on}"
    )
    _print(f"manifest sha256 {bundle.manifest.sha256}")


def _targets(options: argparse.Namespace) -> None:  # noqa: ARG001 - one signature per command
    features = host_features()
    for target in TARGETS:
        runs = "runs here" if features and target.features <= features else "does not run here"
        _print(f"{target.id:<16} {target.triple:<20} {runs}")


def _explain(options: argparse.Namespace) -> None:
    manifest, _ = read_bundle(options.bundle)
    report = read_report(options.bundle)
    _print(
        f"{manifest.model} {manifest.version} for {manifest.target}, {manifest.total_bytes} bytes"
    )
    _print(f"verified on {manifest.verified_on}: {json.dumps(report['native_check'])}")
    for row in report["stages"]:
        _print(f"  {row['name']:<10} {row['seconds']:>8.3f} s{'  cached' * row['cached']}")
    for row in report["explain"]:
        _print(_explain_line(row))
    for name, decibel in sorted(report["sqnr_db"].items(), key=lambda item: item[1])[:8]:
        _print(f"  {name:<24} {decibel:>6.2f} dB")
    _print(f"experts per layer: {json.dumps(report['experts'])}")


def _explain_line(row: Mapping[str, Any]) -> str:
    calls = ", ".join(f"{name} {count}" for name, count in row["calls"].items())
    return (
        f"  {row['operation']:<14} {row['kernel']:<42} {row['weight_bytes']:>9} B"
        f"  {calls}  ({row['why']})"
    )


def _evaluate(options: argparse.Namespace) -> None:
    _, sections = read_bundle(options.bundle)
    scores = evaluate_bundle(
        sections,
        options.cards,
        stem=options.set,
        most_cards=options.most or None,
        in_simulator=options.simulator,
    )
    _print(json.dumps(scores.to_json(), indent=1))


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], None]]] = MappingProxyType(
    {"compile": _compile, "targets": _targets, "explain": _explain, "evaluate": _evaluate}
)


def _show_progress(stage: str, fraction: float) -> None:
    sys.stderr.write(f"{fraction:>5.0%} {stage}\n")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _fail(error: Exception, hint: str, status: int) -> int:
    sys.stderr.write(f"error: {error}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")
    return status
