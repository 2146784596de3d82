"""The command line of the compiler: `python -m compiler`.

What a command produces goes to standard output; progress and errors go to standard error. An error
is one `error:` line and, where something helps, `hint:` lines. Each command is a module of
`compiler.driver.commands`; only the one that is asked for is loaded.
"""

import argparse
import errno
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final

from compiler.contract.errors import ContractError
from compiler.driver.commands.base import Command, Console
from compiler.errors import CompilerError, UsageError, UserModelError
from compiler.hardware.targets import UnknownTargetError

OK: Final = 0
USER_FAULT: Final = 1
BAD_ARGUMENTS: Final = 2
OUR_FAULT: Final = 3
INTERRUPTED: Final = 130
"""As a shell reports a process that Ctrl-C ended."""
EPILOG: Final = (
    "exit status: 0 done, 1 the submission or bundle is at fault, 2 wrong arguments, "
    "3 the machine's fault or ours"
)
_SYSTEM_HINTS: Final[Mapping[int, str]] = MappingProxyType(
    {
        errno.ENOSPC: "free some space, or give --out or --cache another place",
        errno.EDQUOT: "the quota is used up: free some, or give --out or --cache another place",
        errno.EROFS: "that place is read-only: give --out or --cache another one",
        errno.EACCES: "give --out or --cache a place that you may write to",
        errno.EPERM: "give --out or --cache a place that you may write to",
        errno.ENOTDIR: "a part of that path is a file: give another path",
        errno.EISDIR: "that is a directory: name a file in it",
        errno.EMFILE: "raise the limit of open files, for example `ulimit -n 4096`",
    }
)
_SYSTEM: Final = "build.app.system"
_PACKAGE: Final = "compiler.driver.commands"
COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "import": ("import_model", "make a submission of an ONNX file"),
        "compile": ("compile_submission", "compile a submission directory into a bundle"),
        "explain": ("explain", "say what was found, fused and chosen, and what it costs"),
        "targets": ("targets", "list the targets"),
        "operators": ("operators", "list the ONNX operators: how each is compiled, or why not"),
        "simulate": ("simulate", "run a program of a bundle or submission on given inputs"),
        "inspect": ("inspect_bundle", "show sections, plan, weights, buffers, memory and IR"),
        "diff": ("diff", "compare two bundles and predict the update between them"),
        "prune": ("prune", "find how far pictures can be pruned without losing accuracy"),
        "library": ("library", "build a target's kernels as a static library with a header"),
        "evaluate": ("evaluate", "ask a bundle an evaluation set"),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def _run(words: Sequence[str]) -> int:
    asked = next((word for word in words if word in COMMANDS), "")
    command = load(asked) if asked else None
    options, unknown = _parser(asked, command).parse_known_args(words)
    if unknown:
        options.usage_of.error(f"unrecognized arguments: {' '.join(unknown)}")
    console = Console(as_json=options.json)
    assert command is not None  # argparse refuses a line without a command
    try:
        console.show(command.run(options, console))
    except BrokenPipeError:  # the reader of our output left, e.g. `head`
        sys.stderr.close()
    except KeyboardInterrupt:
        console.clear()
        raise
    except (CompilerError, ContractError) as error:
        console.fail(error, error.hint, error.code)
        return _status(error)
    except MemoryError:
        console.fail("out of memory", "give the process more, or compile a smaller model", _SYSTEM)
        return OUR_FAULT
    except OSError as error:
        console.fail(_system_message(error), _SYSTEM_HINTS.get(error.errno or 0, ""), _SYSTEM)
        return OUR_FAULT
    return OK


def _system_message(error: OSError) -> str:
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


def load(name: str) -> Command:
    """Return a command by its name on the command line."""
    command: Command = import_module(f"{_PACKAGE}.{COMMANDS[name][0]}").COMMAND
    return command


def _status(error: CompilerError | ContractError) -> int:
    if isinstance(error, UnknownTargetError | UsageError):
        return BAD_ARGUMENTS
    if isinstance(error, UserModelError | ContractError):
        return USER_FAULT
    return OUR_FAULT


def _parser(asked: str, command: Command | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m compiler",
        description="Compile ONNX submissions into bundles for one target.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, summary) in COMMANDS.items():
        if name != asked or command is None:
            commands.add_parser(name, help=summary)
            continue
        one = commands.add_parser(
            name,
            help=summary,
            description=command.description,
            epilog=f"example:\n  python -m compiler {command.example}\n\n{EPILOG}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print one JSON document")
        one.set_defaults(usage_of=one)
    return parser
