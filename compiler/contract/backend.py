"""What runs the programs of a bundle: one interface, any number of back ends behind it.

    init -> execute(program, inputs) -> outputs ... -> close
            register_custom_op(op)      a program of the host's own, callable like any other

Back ends: the native plan in this process (`device_agent.runtime.native_backend`), a plan runner in
a process of its own (`device_agent.runtime.process_backend`), ONNX Runtime over the submission's
files (`compiler.driver.onnx_backend`). One conformance suite holds them to this page
(`tests/contract/test_backends.py`). A back end is a `PlanRunner`, so sessions run over it.

The base class refuses what is not asked rightly, in the same words for all: a back end only ever
sees programs that it has, with every input there and of its size. Names are one space: a custom op
is called `custom_<owner>_<op>`, no program of a plan may begin so, and who comes second is refused.
Standard library only.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from compiler.contract.errors import ContractError
from compiler.contract.native_errors import TooManyTokensError
from compiler.contract.pipeline import Port, ProgramSpec
from compiler.contract.session import Buffer

CUSTOM_PREFIX: Final = "custom_"
CUSTOM_NAME: Final = re.compile(r"custom_[a-z0-9]+_[a-z0-9][a-z0-9_]{0,47}")


class BackendError(ContractError):
    """A back end was asked wrongly, or cannot do what was asked."""

    code: ClassVar[str] = "contract.backend"


class BackendAbsentError(BackendError):
    """What the back end needs is not installed here."""

    code: ClassVar[str] = "contract.backend.absent"


class BackendCrashedError(BackendError):
    """The process of a back end ended, hung or spoke nonsense.

    The next call starts another one, with an empty cache: look at the picture again.
    """

    code: ClassVar[str] = "contract.backend.crashed"
    retryable: ClassVar[bool] = True


class NameClashError(BackendError):
    """A custom op or a program has a name that is taken, or reserved for the other kind."""

    code: ClassVar[str] = "contract.backend.name_clash"


@dataclass(frozen=True, slots=True)
class CustomOp:
    """A program of the host's own.

    Attributes:
        name: `custom_<owner>_<op>`.
        ports: What it takes and gives.
        run: Given inputs of these sizes, returns outputs of these sizes, by role.
    """

    name: str
    ports: ProgramSpec
    run: Callable[[Mapping[str, Buffer]], Mapping[str, Buffer]]


class Backend(ABC):
    """Runs programs. Used by one thread at a time."""

    name: ClassVar[str]

    def __init__(self) -> None:
        """Know nothing yet; `init` loads."""
        self._programs: Mapping[str, ProgramSpec] = {}
        self._custom: dict[str, CustomOp] = {}
        self._is_ready = False

    def init(self) -> Self:
        """Load what it runs; twice is once.

        Raises:
            BackendAbsentError: Something is not installed.
            NameClashError: A program of the plan has a name that is reserved for custom ops.
            ContractError: The plan does not load.
        """
        if self._is_ready:
            return self
        programs = self._load()
        clash = [n for n in programs if n.startswith(CUSTOM_PREFIX) or n in self._custom]
        if clash:
            self._unload()
            raise NameClashError(
                f"the plan has a program {clash[0]!r}",
                hint=f"names that begin with {CUSTOM_PREFIX!r} belong to custom ops",
            )
        self._programs, self._is_ready = programs, True
        return self

    @property
    def programs(self) -> Mapping[str, ProgramSpec]:
        """What can be executed, custom ops included."""
        return {**self._programs, **{op.name: op.ports for op in self._custom.values()}}

    def execute(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one program.

        Args:
            program: One of `programs`.
            inputs: Raw little-endian rows by role; the rows of dynamic inputs say T.

        Returns:
            Raw little-endian rows by role, valid until the next call.

        Raises:
            BackendError: It is not initialised, there is no such program, or an input is missing,
                too many, or of a wrong size.
            TooManyTokensError: More rows than one run takes.
            BackendCrashedError: The process behind it is gone.
            ContractError: The plan ended with an error status.
        """
        custom = self._custom.get(program)
        spec = self._programs.get(program) if custom is None else custom.ports
        if not self._is_ready:
            raise BackendError(f"the {self.name} back end is not initialised", hint="call init")
        if spec is None:
            known = ", ".join(sorted(self.programs))
            raise BackendError(f"there is no program {program!r}", hint=f"programs: {known}")
        tokens = check_inputs(spec, inputs)
        if custom is not None:
            return _run_custom(custom, inputs, tokens)
        return self._execute(program, inputs)

    run = execute
    """What a `PlanRunner` calls it."""

    def register_custom_op(self, op: CustomOp) -> None:
        """Make a program of the host's own callable by its name.

        Raises:
            NameClashError: The name is taken, or is not `custom_<owner>_<op>`.
        """
        if CUSTOM_NAME.fullmatch(op.name) is None:
            raise NameClashError(
                f"{op.name!r} is no name of a custom op",
                hint="custom_<owner>_<op>: lower-case letters, digits, underscores",
            )
        if op.name in self._custom or op.name in self._programs:
            raise NameClashError(
                f"there is an op {op.name!r} already", hint="put your own name in <owner>"
            )
        self._custom[op.name] = op

    @property
    @abstractmethod
    def kv_length(self) -> int:
        """Rows in the key/value cache."""

    @kv_length.setter
    @abstractmethod
    def kv_length(self, length: int) -> None:
        """Forget every row from `length` on; see `PlanRunner`."""

    def close(self) -> None:
        """Let go of everything; `init` loads it again."""
        if self._is_ready:
            self._is_ready, self._programs = False, {}
            self._unload()

    def __enter__(self) -> Self:
        return self.init()

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _load(self) -> Mapping[str, ProgramSpec]:
        """Load and return the programs."""

    @abstractmethod
    def _execute(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one of them; inputs are checked."""

    @abstractmethod
    def _unload(self) -> None:
        """Let go."""


def check_inputs(spec: ProgramSpec, inputs: Mapping[str, Buffer]) -> int:
    """Return T, the rows of dynamic inputs, or 0 if there are none.

    Raises:
        BackendError: An input is missing, too many, or of a wrong size.
        TooManyTokensError: More rows than one run takes.
    """
    if inputs.keys() != spec.inputs.keys():
        raise BackendError(f"inputs must be {sorted(spec.inputs)}, not {sorted(inputs)}")
    tokens = 0
    for role, port in spec.inputs.items():
        size = memoryview(inputs[role]).nbytes
        if not port.dynamic:
            _require_size("input", role, size, port.row_bytes * port.rows)
            continue
        rows = size // port.row_bytes
        if rows * port.row_bytes != size or rows < 1 or tokens not in (0, rows):
            raise BackendError(f"input {role!r} of {size} bytes does not fit the others")
        if rows > port.rows:
            raise TooManyTokensError(f"{rows} tokens, at most {port.rows}")
        tokens = rows
    return tokens


def _require_size(kind: str, role: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise BackendError(f"{kind} {role!r} has {found} bytes, not {wanted}")


def _run_custom(op: CustomOp, inputs: Mapping[str, Buffer], tokens: int) -> dict[str, memoryview]:
    try:
        made = op.run(inputs)
    except Exception as error:  # what the host wrote may raise anything
        raise BackendError(f"{op.name}: {type(error).__name__}: {error}") from error
    if made.keys() != op.ports.outputs.keys():
        raise BackendError(f"{op.name} gave {sorted(made)}, not {sorted(op.ports.outputs)}")
    found = {role: memoryview(data).cast("B") for role, data in made.items()}
    for role, port in op.ports.outputs.items():
        wanted = port.row_bytes * (tokens if port.dynamic else port.rows)
        _require_size(f"{op.name}: output", role, len(found[role]), wanted)
    return found


__all__ = ["Backend", "BackendError", "CustomOp", "Port", "ProgramSpec", "check_inputs"]
