"""`operators`: every operator of the ONNX domain, how it is compiled or why it is refused."""

import argparse
from dataclasses import asdict

from compiler.contract.canonical import Json
from compiler.driver.commands.base import Answer, Command, Console, table
from compiler.errors import UsageError
from compiler.frontend.operator_table import How, as_markdown, operator_table


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="OPERATOR", help="only these")
    parser.add_argument("--refused", action="store_true", help="only those that are refused")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/operators.md")


def _run(options: argparse.Namespace, console: Console) -> Answer:  # noqa: ARG001 - one signature
    rows = operator_table()
    unknown = sorted(set(options.names) - {row.name for row in rows})
    if unknown:
        raise UsageError(f"the ONNX domain has no operator {unknown[0]!r}")
    if options.names:
        rows = tuple(row for row in rows if row.name in options.names)
    if options.refused:
        rows = tuple(row for row in rows if row.how is How.REFUSED)
    document: list[Json] = [{**asdict(row), "how": row.how.value} for row in rows]
    if options.markdown:
        return Answer(as_markdown(rows).splitlines(), document)
    cells = [
        (row.name, row.since, row.how, "; ".join(t for t in (row.note, row.way_out) if t))
        for row in rows
    ]
    return Answer(table(cells), document)


COMMAND = Command(
    description="List the operators of the ONNX domain: how each is compiled, or why it is not.",
    example="operators --refused",
    add_arguments=_arguments,
    run=_run,
)
