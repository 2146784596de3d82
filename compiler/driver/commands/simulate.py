"""`simulate`: run programs of a bundle or submission on given inputs, in order, over one cache."""

import argparse
import contextlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.canonical import Json, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.native import NativePlan
from compiler.contract.plan import parse_plan
from compiler.contract.session import PlanRunner
from compiler.driver.bundle_files import MANIFEST, read_bundle
from compiler.driver.bundle_simulator import module_of
from compiler.driver.cache import StageCache, write_atomic
from compiler.driver.commands.base import Answer, Command, Console, require_writable
from compiler.driver.kernel_stage import kernels_for
from compiler.driver.limit_options import add_limit_options, limits_of
from compiler.driver.lowering import lower_submission
from compiler.driver.native_check import host_target, runs_here
from compiler.driver.stages import StageClock
from compiler.emitters.plan import emit_plan
from compiler.errors import UNREADABLE, SelfTestError, UsageError
from compiler.hardware.targets import find_target
from compiler.kernels.program import Module, Program
from compiler.quant.module import pack_module
from compiler.quant.w4 import PackedW4
from compiler.simulator import Simulator

RANDOM: Final = "random"
SEED: Final = 1
SHOWN_VALUES: Final = 6
MAX_JSON_BYTES: Final = 256 * 1024 * 1024
_DTYPES: Final[Mapping[str, Any]] = {"f32": np.float32, "i32": np.int32, "u8": np.uint8}
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Model:
    """A module, its packed weights, and the bundle it came from if it came from one."""

    module: Module
    packed: Mapping[int, PackedW4]
    target: str = ""
    sections: Mapping[str, bytes] | None = None


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="bundle directory, or submission directory")
    parser.add_argument(
        "--run",
        action="append",
        required=True,
        metavar="PROGRAM=FILE",
        help="inputs by role in .npz or .json, or the word random; may be given several times",
    )
    parser.add_argument("--mode", choices=("bits", "f64"), default="bits", help="default: bits")
    parser.add_argument("--compare", choices=("native",), help="run native code beside it")
    parser.add_argument("--out", type=Path, help=".npz for the outputs, <number>.<program>.<role>")
    parser.add_argument("--cache", type=Path, help="directory for stage results")
    add_limit_options(parser)


def _run(options: argparse.Namespace, console: Console) -> Answer:
    if options.out is not None:
        require_writable(options.out.parent)
    model = _load(options, console)
    runs = [_inputs(text, model.module) for text in options.run]
    simulator = Simulator(model.module, dict(model.packed), options.mode)
    kept: Arrays = {}
    rows: list[dict[str, Json]] = []
    with contextlib.ExitStack() as stack:
        native = None
        if options.compare:
            native = stack.enter_context(_native(model, options.cache))
        for number, (program, inputs) in enumerate(runs):
            console.progress(f"run {number} {program.name}", number / len(runs))
            outputs = simulator.run_arrays(program.name, inputs)
            theirs = _run_native(native, program, inputs, model.module) if native else {}
            kept |= {f"{number}.{program.name}.{role}": outputs[role] for role in sorted(outputs)}
            rows += _rows(number, program, outputs, theirs, model.module)
    if options.out is not None:
        write_atomic(options.out, _npz(kept))
    differing = [row for row in rows if row.get("equal_bits") is False]
    if differing and options.mode == "bits":
        worst = differing[0]
        raise SelfTestError(
            f"simulator and native code differ in run {worst['run']}, output {worst['output']}",
            hint="run again with --mode f64 to see which of the two is right",
        )
    return Answer([_line(row) for row in rows], {"mode": options.mode, "outputs": rows})


def _load(options: argparse.Namespace, console: Console) -> _Model:
    if (options.model / MANIFEST).exists():
        manifest, sections = read_bundle(options.model)
        module, packed = module_of(sections)
        return _Model(module, packed, manifest.target, sections)
    lowered = lower_submission(options.model, StageClock(console.progress), limits_of(options))
    return _Model(lowered.module, pack_module(lowered.module).packed)


def _inputs(text: str, module: Module) -> tuple[Program, Arrays]:
    """Return the program and its input arrays, as `PROGRAM=FILE` names them.

    Raises:
        UsageError: There is no such program, or the text is not of that form.
        ContractError: The file is unreadable, or an array does not fit its port.
    """
    name, _, source = text.partition("=")
    programs = {program.name: program for program in module.programs}
    if name not in programs or not source:
        raise UsageError(
            f"--run {text!r} names no program and file",
            hint=f"programs: {', '.join(programs)}; for example --run {min(programs)}=in.npz",
        )
    program = programs[name]
    if source == RANDOM:
        return program, _random_inputs(program, module)
    found = _read(Path(source))
    if found.keys() != program.inputs.keys():
        raise ContractError(
            f"{source} holds {sorted(found)}, program {name} takes {sorted(program.inputs)}",
            hint="name the arrays by role; `inspect BUNDLE plan` lists them",
        )
    return program, {
        role: _fitting(found[role], module, at, f"{source}: {role}")
        for role, at in program.inputs.items()
    }


def _fitting(array: NDArray[Any], module: Module, at: int, what: str) -> NDArray[Any]:
    buffer = module.buffers[at]
    rows = "T" if buffer.dynamic else str(buffer.rows)
    wanted = f"{buffer.dtype} of {rows} x {buffer.cols}"
    held = array.size // buffer.cols
    if array.size == 0 or array.size % buffer.cols or not (buffer.dynamic or held == buffer.rows):
        raise ContractError(
            f"{what} has shape {array.shape}, expected {wanted}",
            hint="any shape of as many elements in C order will do, such as the ONNX file's own",
        )
    shaped = array.reshape(-1, buffer.cols)
    cast = shaped.astype(_DTYPES[buffer.dtype])
    if buffer.dtype != "f32" and not np.array_equal(cast, shaped):
        raise ContractError(f"{what} holds values that no {buffer.dtype} can hold")
    return cast


def _random_inputs(program: Program, module: Module) -> Arrays:
    """Return seeded inputs: normal floats, any bytes, and zeros for indices."""
    random = np.random.default_rng(SEED)
    found: Arrays = {}
    for role, at in sorted(program.inputs.items()):
        buffer = module.buffers[at]
        shape = (1 if buffer.dynamic else buffer.rows, buffer.cols)
        if buffer.dtype == "f32":
            found[role] = random.standard_normal(shape).astype(np.float32)
        elif buffer.dtype == "u8":
            found[role] = random.integers(0, 256, shape, np.uint8)
        else:
            found[role] = np.zeros(shape, np.int32)
    return found


def _read(path: Path) -> Arrays:
    try:
        if path.suffix == ".json":
            document = parse_object(path.read_bytes(), limit_bytes=MAX_JSON_BYTES)
            return _numbers({role: np.array(value) for role, value in document.items()})
        with zipfile.ZipFile(path):
            pass  # what else numpy reads holds one array, or none
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return _numbers({role: archive[role] for role in archive.files})
    except OSError as error:
        raise ContractError(
            f"{path} cannot be read: {error.strerror or error}", hint="name a .npz or .json file"
        ) from error
    except UNREADABLE as error:
        raise ContractError(
            f"{path} is no .npz or .json of arrays: {error}",
            hint="numpy.savez(FILE, ROLE=ARRAY) writes one, as does JSON of ROLE: nested lists",
        ) from error


def _numbers(arrays: Arrays) -> Arrays:
    for role, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{role} holds something else than numbers")
    return arrays


def _native(model: _Model, cache_dir: Path | None) -> NativePlan:
    """Load native code: the bundle's own where it runs here, else kernels for this machine.

    Raises:
        UsageError: This machine can run no target.
        ContractError: Plan, kernels or weights do not fit each other.
    """
    sections = model.sections
    if sections is not None and runs_here(find_target(model.target)):
        return NativePlan(sections["kernels"], sections["plan"], sections)
    host = host_target()
    if host is None:
        raise UsageError("this machine can run no target", hint="leave --compare out")
    if sections is None:
        emitted = emit_plan(model.module, weights_packed=model.packed)
        sections = {**emitted.sections, "plan": emitted.plan_bytes}
    cache, ops = StageCache(cache_dir), parse_plan(sections["plan"]).ops
    kernels = kernels_for(host, ops, cache)
    return NativePlan(kernels, sections["plan"], sections)


def _run_native(
    plan: PlanRunner, program: Program, inputs: Arrays, module: Module
) -> dict[str, NDArray[Any]]:
    raw = plan.run(program.name, {role: array.tobytes() for role, array in inputs.items()})
    found = {}
    for role, at in program.outputs.items():
        buffer = module.buffers[at]
        flat = np.frombuffer(bytes(raw[role]), _DTYPES[buffer.dtype])
        found[role] = flat.reshape(-1, buffer.cols)
    return found


def _rows(
    number: int, program: Program, ours: Arrays, theirs: Arrays, module: Module
) -> list[dict[str, Json]]:
    return [
        {
            "run": number,
            "program": program.name,
            "output": role,
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            **_values(array),
            **_compared(array, theirs.get(role), module, program, role),
        }
        for role, array in sorted(ours.items())
    ]


def _values(array: NDArray[Any]) -> dict[str, Json]:
    """Return the first elements, and least and greatest of the finite ones."""
    finite = array[np.isfinite(array)]
    found: dict[str, Json] = {
        "first": [_number(value) for value in array.reshape(-1)[:SHOWN_VALUES].tolist()],
        "not_finite": int(array.size - finite.size),
    }
    if finite.size:
        found |= {"min": finite.min().item(), "max": finite.max().item()}
    return found


def _number(value: float) -> Json:
    return value if np.isfinite(value) else str(value)


def _compared(
    ours: NDArray[Any], theirs: NDArray[Any] | None, module: Module, program: Program, role: str
) -> dict[str, Json]:
    if theirs is None:
        return {}
    dtype = _DTYPES[module.buffers[program.outputs[role]].dtype]
    same = ours.shape == theirs.shape and ours.astype(dtype).tobytes() == theirs.tobytes()
    error = 0.0
    if ours.shape == theirs.shape and ours.size:
        difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max()
        error = float(difference / max(np.abs(ours.astype(np.float64)).max(), 1e-30))
    return {"equal_bits": same, "relative_error": error}


def _npz(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _line(row: Mapping[str, Any]) -> str:
    text = f"run {row['run']} {row['program']}: {row['output']} {row['dtype']} {row['shape']}"
    first = " ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row["first"])
    text += f" = {first}" + (" ..." if np.prod(row["shape"]) > len(row["first"]) else "")
    if "min" in row:
        text += f", from {row['min']:.4g} to {row['max']:.4g}"
    if row["not_finite"]:
        text += f", {row['not_finite']} not finite"
    if "equal_bits" in row:
        text += ", same bits as native code" if row["equal_bits"] else ", native code differs"
        text += f", largest relative difference {row['relative_error']:.3g}"
    return text


COMMAND = Command(
    description=(
        "Run programs in the reference simulator: `bits` gives the bits of the native code, `f64`\n"
        "the same mathematics in double precision (of a submission: on its original weights)."
    ),
    example="simulate build/my-model --run see=card.npz --run step=question.json --compare native",
    add_arguments=_arguments,
    run=_run,
)
