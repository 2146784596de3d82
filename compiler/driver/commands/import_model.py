"""`import`: a submission directory for one ONNX file, what it leaves open given on the line."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from compiler.contract.canonical import Json
from compiler.driver.commands.base import Answer, Command, Console, UsageError, require_writable
from compiler.frontend.describe import write_submission
from compiler.passes.pipeline_spec import QUANTISE_NONE

Number = TypeVar("Number", int, float)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="ONNX file; external data stands beside it")
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
        choices=("none", "w4"),
        default=QUANTISE_NONE,
        help="w4 stores large matrices in four bits (default: none)",
    )


def _run(options: argparse.Namespace, console: Console) -> Answer:
    require_writable(options.out)
    dims = _pairs(options.dim, "--dim", int)
    constants = _pairs(options.constant, "--constant", float)
    console.progress("import", 0.0)
    spec = write_submission(options.source, options.out, dims, constants, quantise=options.quantise)
    components: dict[str, Json] = {
        component.name: {
            "file": component.file,
            "inputs": {port.name: port.role for port in component.inputs},
            "outputs": {port.name: port.role for port in component.outputs},
        }
        for component in spec.components
    }
    lines = [f"{options.out}: family {spec.family}, {len(spec.components)} components"]
    for component in spec.components:
        inputs = ", ".join(f"{port.name} ({port.role})" for port in component.inputs)
        outputs = ", ".join(f"{port.name} ({port.role})" for port in component.outputs)
        lines.append(f"  {component.name}: {inputs} -> {outputs}")
    lines.append(f"next: python -m compiler compile {options.out} --target TARGET --out BUNDLE")
    return Answer(lines, {"family": spec.family, "components": components, "out": str(options.out)})


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
        "role, and the file beside it. Axes left open are listed if no size is given."
    ),
    example="import model.onnx --out build/submission --dim batch=1 --constant threshold=0.5",
    add_arguments=_arguments,
    run=_run,
)
