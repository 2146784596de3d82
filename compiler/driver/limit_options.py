"""One command line option per field of `ImportLimits`, for every command that imports."""

import argparse
from dataclasses import fields
from typing import Final

from compiler.errors import LimitError, UsageError
from compiler.frontend.limits import DEFAULT_LIMITS, ImportLimits

_MEANINGS: Final = {
    "max_file_bytes": "bytes of an ONNX file with its external data",
    "max_nodes": "nodes of a file with its functions inlined",
    "max_nesting": "depth of subgraphs and functions",
    "max_tensor_elements": "elements of a tensor that is computed",
    "max_folded_bytes": "bytes of constants made while folding a component",
    "max_seconds": "seconds of the import, and of the passes",
    "max_memory_bytes": "address space of the process",
}


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add `--max-...` for every limit, with its default in the help text."""
    group = parser.add_argument_group("limits", "a submission that needs more is refused")
    for item in fields(ImportLimits):
        default = getattr(DEFAULT_LIMITS, item.name)
        group.add_argument(
            f"--{item.name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar="N",
            help=f"{_MEANINGS[item.name]} (default: {default:g})"
            if isinstance(default, float)
            else f"{_MEANINGS[item.name]} (default: {default})",
        )


def limits_of(options: argparse.Namespace) -> ImportLimits:
    """Return the limits that the options ask for.

    Raises:
        UsageError: One of them is out of range.
    """
    given = {item.name: getattr(options, item.name) for item in fields(ImportLimits)}
    try:
        return ImportLimits(**given)
    except LimitError as error:
        raise UsageError(str(error), hint=error.hint) from error
