"""`import`: a submission of one ONNX file, or of a directory in the layout of a multimodal family.

What the files leave open is given on the line; an option of the other kind of source is refused.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Final, TypeVar

from compiler.contract.canonical import Json
from compiler.driver.bounds import bounded
from compiler.driver.commands.base import Answer, Command, Console, require_writable
from compiler.driver.limit_options import add_limit_options, limits_of
from compiler.errors import UsageError
from compiler.frontend.describe import write_submission
from compiler.frontend.families import FamilyOptions, write_family_submission
from compiler.frontend.limits import ImportLimits
from compiler.frontend.pipeline_json import FILE_NAME
from compiler.passes.pipeline_spec import QUANTISE_NONE, PipelineSpec, Port

Number = TypeVar("Number", int, float)

FILE_OPTIONS: Final = ("dim", "constant", "quantise")
FAMILY_OPTIONS: Final = ("precision", "max_context", "max_step_tokens", "max_answer_tokens")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        help="ONNX file, external data beside it; or a directory of vision, embedding and decoder",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for the submission")
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=N",
        help="size of a free axis, by name or as input:axis; may be given several times",
    )
    parser.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="INPUT=VALUE",
        help="value of an input that never changes; may be given several times",
    )
    parser.add_argument(
        "--quantise",
        choices=("none", "w4", "w8"),
        help=f"w4 stores large matrices in four bits, w8 in eight (file; default: {QUANTISE_NONE})",
    )
    parser.add_argument(
        "--precision",
        metavar="SUFFIX",
        help="which of several exports to take, such as q4 (directory; default: the highest)",
    )
    for name, what in (
        ("--max-context", "rows of the cache (directory; default: what the configuration says)"),
        ("--max-step-tokens", "the most token rows of one run (directory; default: 64)"),
        ("--max-answer-tokens", "where an answer is cut off (directory; default: 256)"),
    ):
        parser.add_argument(name, type=int, metavar="N", help=what)
    add_limit_options(parser)


def _run(options: argparse.Namespace, console: Console) -> Answer:
    _check_source(options.source)
    require_writable(options.out)
    is_family = options.source.is_dir()
    _refuse_others(options, FILE_OPTIONS if is_family else FAMILY_OPTIONS, is_family=is_family)
    limits = limits_of(options)
    console.progress("import", 0.0)
    with bounded(limits):
        spec = _import_family(options, limits) if is_family else _import_file(options, limits)
    components: dict[str, Json] = {
        component.name: {
            "file": component.file,
            "inputs": {port.name: port.role for port in component.inputs},
            "outputs": {port.name: port.role for port in component.outputs},
            "shapes": {p.name: list(p.shape) for p in component.inputs if p.shape is not None},
        }
        for component in spec.components
    }
    lines = [f"{options.out}: a submission of family {spec.family}"]
    for component in spec.components:
        inputs = ", ".join(map(_shown, component.inputs))
        outputs = ", ".join(map(_shown, component.outputs))
        lines.append(f"  {component.name}: {inputs} -> {outputs}")
    out = quote(str(options.out))
    lines.append(f"next: python -m compiler compile {out} --target TARGET --out BUNDLE")
    return Answer(lines, {"family": spec.family, "components": components, "out": str(options.out)})


def _check_source(source: Path) -> None:
    """Refuse what is no source at all.

    Raises:
        UsageError: Nothing is there, or it is a submission already.
    """
    if not source.exists():
        raise UsageError(f"{source} does not exist", hint="name an ONNX file or a directory")
    if (source / FILE_NAME).exists():
        raise UsageError(
            f"{source} is a submission already",
            hint=f"next: python -m compiler compile {quote(str(source))} --target TARGET"
            " --out BUNDLE",
        )


def _shown(port: Port) -> str:
    """Return name, role and pinned shape of a port."""
    sizes = f" {'x'.join(map(str, port.shape)) or 'scalar'}" if port.shape is not None else ""
    return f"{port.name} (role {port.role}{sizes})"


def _import_file(options: argparse.Namespace, limits: ImportLimits) -> PipelineSpec:
    return write_submission(
        options.source,
        options.out,
        _pairs(options.dim, "--dim", int),
        _pairs(options.constant, "--constant", float),
        quantise=options.quantise or QUANTISE_NONE,
        limits=limits,
    )


def _import_family(options: argparse.Namespace, limits: ImportLimits) -> PipelineSpec:
    given = {name: getattr(options, name) for name in FAMILY_OPTIONS}
    return write_family_submission(
        options.source,
        options.out,
        FamilyOptions(
            **{name: value for name, value in given.items() if value is not None}, limits=limits
        ),
    )


def _refuse_others(options: argparse.Namespace, names: Sequence[str], *, is_family: bool) -> None:
    """Refuse options that say nothing about this kind of source, and sizes below one.

    Raises:
        UsageError: Names the option.
    """
    for name in names:
        if getattr(options, name):
            option = "--" + name.replace("_", "-")
            kind, other = ("directory", "file") if is_family else ("file", "directory")
            raise UsageError(
                f"{option} is an option of a {other}, {options.source} is a {kind}",
                hint="`python -m compiler import --help` says which option belongs to which",
            )
    for name in FAMILY_OPTIONS[1:]:
        if (value := getattr(options, name)) is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} {value} is not a size", hint=f"for example {option} 64")


def _pairs(texts: Sequence[str], option: str, kind: type[Number]) -> Mapping[str, Number]:
    """Return NAME=VALUE texts as a mapping.

    Raises:
        UsageError: A text is not of that form, or a name comes twice.
    """
    found: dict[str, Number] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            number = kind(value)
        except ValueError:
            number = None
        if not name or number is None or name in found:
            raise UsageError(
                f"{option} {text!r} does not give one name one number",
                hint=f"for example {option} batch=1",
            )
        found[name] = number
    return found


COMMAND = Command(
    description=(
        "Make a submission of an ONNX file: pipeline.json with every input and output in its\n"
        "role, and the file beside it. Axes left open are listed if no size is given.\n"
        "A directory as ORT-GenAI, transformers.js or MiniCPM-V lay it out becomes a pipeline of\n"
        "vision, embedding and decoder."
    ),
    example="import model.onnx --out build/submission --dim batch=1 --constant threshold=0.5",
    add_arguments=_arguments,
    run=_run,
)
