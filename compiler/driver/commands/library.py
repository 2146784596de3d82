"""`library`: the kernels of a target as a static library, for programs that link them."""

import argparse
import tempfile
from pathlib import Path

from compiler.contract.canonical import Json
from compiler.contract.operations import Op
from compiler.driver.commands.base import Answer, Command, Console
from compiler.emitters.archive import build_archive
from compiler.emitters.backends import emitter_for
from compiler.emitters.c import CEmitter
from compiler.errors import UsageError
from compiler.hardware.targets import find_target


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="target id, see `targets`")
    parser.add_argument("--out", type=Path, required=True, help="folder for library and header")
    parser.add_argument("--ops", default="", help="operations, comma separated; all of them")


def _run(options: argparse.Namespace, console: Console) -> Answer:  # noqa: ARG001 - one signature
    names = [name for name in options.ops.upper().split(",") if name]
    unknown = sorted(set(names) - set(Op.__members__))
    if unknown:
        raise UsageError(
            f"there is no operation {unknown[0]!r}", hint=f"operations: {', '.join(Op.__members__)}"
        )
    ops = [Op[name] for name in names] or list(Op)
    target = find_target(options.target)
    if not isinstance(emitter_for(target), CEmitter):
        raise UsageError(
            f"a library to link is machine code, and {target.id} has none",
            hint="see `targets` for those with the back end of a processor",
        )
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sparsefleet-library-") as cache:
        files = build_archive(target, ops, Path(cache))
    for name, data in files.items():
        (out / name).write_bytes(data)
    document: Json = {name: len(data) for name, data in files.items()}
    return Answer([f"{out / name}: {len(data)} bytes" for name, data in files.items()], document)


COMMAND = Command(
    description="Build the kernels of a target as a static library with a header.",
    example="library --target aarch64-sve2 --ops LINEAR,EXPERTS --out var/kernels",
    add_arguments=_arguments,
    run=_run,
)
