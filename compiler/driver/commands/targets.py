"""`targets`: what can be compiled for, and what of it this machine can check by running it."""

import argparse

from compiler.contract.canonical import Json
from compiler.driver.commands.base import Answer, Command, Console, table
from compiler.driver.native_check import emulator_of, host_features, runs_here
from compiler.hardware.targets import TARGETS, Target
from compiler.kernels.select import select_tile


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(nothing=None)


def _run(options: argparse.Namespace, console: Console) -> Answer:  # noqa: ARG001 - one signature
    rows = [
        (target.id, target.triple, select_tile(target.isa).isa, _checked(target))
        for target in TARGETS
    ]
    document: list[Json] = [
        {
            "id": target.id,
            "triple": target.triple,
            "tile": select_tile(target.isa).isa,
            "features": sorted(target.features),
            "missing_here": sorted(target.features - host_features()),
            "runs_here": runs_here(target),
            "emulator": " ".join(emulator_of(target) or ()),
        }
        for target in TARGETS
    ]
    return Answer(table(rows), document)


def _checked(target: Target) -> str:
    if runs_here(target):
        return "runs here"
    return "emulated here" if emulator_of(target) else "does not run here"


COMMAND = Command(
    description="List the targets, the kernels each gets, and whether this machine can run them.",
    example="targets --json",
    add_arguments=_arguments,
    run=_run,
)
