"""`targets`: what can be compiled for, and what of it this machine can check by running it."""

import argparse

from compiler.contract.canonical import Json
from compiler.driver.commands.base import Answer, Command, Console, table
from compiler.driver.native_check import emulator_of, host_features, runs_here
from compiler.hardware.library import accelerators, load_socs, variants
from compiler.hardware.measured import measured_label
from compiler.hardware.targets import ALL_TARGETS, OPENCL, Target
from compiler.kernels.select import select_tile


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socs",
        action="store_true",
        help="list the systems on chip of the capability library instead, with what each runs",
    )


def _run(options: argparse.Namespace, console: Console) -> Answer:  # noqa: ARG001 - one signature
    return _socs() if options.socs else _targets()


def _socs() -> Answer:
    rows = [
        (
            f"{soc.vendor} {soc.name}",
            ", ".join(soc.cores),
            ", ".join(target.id for target in variants(soc)),
            variants(soc)[0].verified_on,
            soc.verified_on if soc.system == "linux" else f"{soc.verified_on} ({soc.system})",
            f"{soc.gpu}: {soc.verified_on}" if soc.gpu else "",
        )
        for soc in load_socs()
    ]
    document: list[Json] = [
        {
            "id": soc.id,
            "vendor": soc.vendor,
            "name": soc.name,
            "class": soc.device_class,
            "arch": soc.arch,
            "cores": list(soc.cores),
            "features": sorted(soc.features),
            "system": soc.system,
            "memory_gb_s": soc.memory_gb_s,
            "npu": soc.npu,
            "gpu": soc.gpu,
            "targets": [target.id for target in variants(soc)],
            "accelerator_targets": [target.id for target in accelerators(soc)],
            "verified_on": soc.verified_on,
        }
        for soc in load_socs()
    ]
    head = (
        *("system on chip", "cores", "targets, best first", "bits checked on", "on a device"),
        "opencl on its GPU",
    )
    return Answer(table([head, *rows]), document)


def _targets() -> Answer:
    rows = [
        (
            target.id,
            target.backend,
            target.triple,
            select_tile(target.isa).isa,
            target.verified_on,
            measured_label(target.id),
            _checked(target),
        )
        for target in ALL_TARGETS
    ]
    document: list[Json] = [
        {
            "id": target.id,
            "backend": target.backend,
            "triple": target.triple,
            "verified_on": target.verified_on,
            "tile": select_tile(target.isa).isa,
            "features": sorted(target.features),
            "missing_here": sorted(target.features - host_features()),
            "runs_here": runs_here(target),
            "emulator": " ".join(emulator_of(target) or ()),
            "policy_measured_on": measured_label(target.id),
        }
        for target in ALL_TARGETS
    ]
    head = (
        *("target", "back end", "triple", "tile", "bits checked on", "policy measured on"),
        "this machine",
    )
    return Answer(table([head, *rows]), document)


def _checked(target: Target) -> str:
    if target.backend == OPENCL.backend:
        return "by name only: no device is given it"
    if runs_here(target):
        return "runs here"
    return "emulated here" if emulator_of(target) else "does not run here"


COMMAND = Command(
    description=(
        "List the targets, the kernels each gets, whether this machine can run them, and where "
        "the cost model of their policies was measured; "
        "or what the systems on chip of the capability library run."
    ),
    example="targets --json",
    add_arguments=_arguments,
    run=_run,
)
