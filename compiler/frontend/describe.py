"""A bare ONNX file as a submission: `pipeline.json` of family `graph` written from the file itself.

    model.onnx, {"batch": 1, "x:2": 48}, {"sr": 16000}  ->  out/pipeline.json, out/model.onnx

Every size is fixed here. A free axis is pinned by its name, or by `input:axis`; a scalar that
chooses a path (a sample rate) by its value. What is missing is listed, all of it at once.
"""

import difflib
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import onnx

from compiler.errors import MalformedModelError
from compiler.frontend.contrib_bodies import expand_contrib
from compiler.frontend.evaluate import needed
from compiler.frontend.function_bodies import inline_operators
from compiler.frontend.limits import DEFAULT_LIMITS, ImportLimits
from compiler.frontend.onnx_file import external_files, read_model
from compiler.frontend.operator_check import require_operators
from compiler.frontend.pipeline_json import FILE_NAME, SCHEMA, parse_pipeline, read_pipeline
from compiler.passes.pipeline_spec import (
    FAMILY_GRAPH,
    QUANTISE_NONE,
    ROLE_TENSOR,
    PipelineSpec,
)

MODEL_FILE: Final = "model.onnx"
MAX_ROLE_NAME: Final = 24


@dataclass(frozen=True, slots=True)
class FreeAxis:
    """An axis that the file leaves open: its input, number, and name if it has one."""

    input: str
    axis: int
    name: str

    @property
    def how(self) -> str:
        """How to give its size."""
        place = f"{self.input}:{self.axis}"
        return f"{self.name} (or {place})" if self.name else place


def write_submission(
    source: Path,
    out: Path,
    dims: Mapping[str, int],
    constants: Mapping[str, float],
    *,
    quantise: str = QUANTISE_NONE,
    limits: ImportLimits = DEFAULT_LIMITS,
) -> PipelineSpec:
    """Write a submission directory for one ONNX file.

    Args:
        source: The ONNX file; external data beside it is copied too.
        out: Directory to write into; made if missing.
        dims: Sizes of free axes by name, or by `input:axis`.
        constants: Values of inputs that are fixed once and for all, by input name.
        quantise: `none` keeps weights as they are but those of experts, which are stored in four
            bits, `w4` stores large matrices in four, `w8` in eight.
        limits: What reading the file may cost; the caller holds time and memory within them.

    Returns:
        The description, as read back from what was written.

    Raises:
        MalformedModelError: The file is broken; a size or constant names nothing in the file; or
            axes are left open: the message lists them and the hint says how to give them.
        UnsupportedOperatorError: Operators have no rule; the message names them all.
        LimitError: The file is larger than the limits.
    """
    model = read_model(source, limits)
    initializers = {item.name for item in model.graph.initializer}
    inputs = [info for info in model.graph.input if info.name not in initializers]
    _check_names(inputs, dims, constants)
    shapes = _pinned(inputs, dims, constants)
    entries = {
        info.name: _input_entry(info, role, shapes, constants)
        for info, role in zip(inputs, _roles(inputs, constants), strict=True)
    }
    document = _document(entries, list(model.graph.output), quantise)
    _check_operators(model, source.name)
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    parse_pipeline(text.encode())  # what it refuses is not written
    data_files = external_files(source)
    _check_file_names(data_files, source.name)
    out.mkdir(parents=True, exist_ok=True)
    for name in data_files:
        _copy(source.parent / name, out / name)
    _copy(source, out / MODEL_FILE)
    (out / FILE_NAME).write_text(text)
    return read_pipeline(out)


def _check_file_names(data_files: Sequence[str], file: str) -> None:
    """Refuse a data file that would lie where a file of the submission itself lies."""
    for name in data_files:
        if str(PurePosixPath(name)) in {FILE_NAME, MODEL_FILE}:
            raise MalformedModelError(
                f"external data of {file} is called {name!r}, as a submission's own file is",
                hint="save the model again with another name for its data file",
            )


def _copy(source: Path, target: Path) -> None:
    """Copy a file, unless it lies there already: a submission may be made beside its model."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not (target.exists() and target.samefile(source)):
        shutil.copyfile(source, target)


def _check_operators(model: onnx.ModelProto, file: str) -> None:
    """Refuse a model of operators without a rule now, and not when it is compiled."""
    plain = inline_operators(model, file)
    expand_contrib(plain)
    require_operators(needed(plain.graph.node, [info.name for info in plain.graph.output]))


def _document(
    inputs: Mapping[str, Any], outputs: Sequence[onnx.ValueInfoProto], quantise: str
) -> dict[str, Any]:
    roles = zip(outputs, _roles(outputs, {}), strict=True)
    model = {
        "file": MODEL_FILE,
        "inputs": inputs,
        "outputs": {info.name: {"role": role} for info, role in roles},
    }
    return {
        "schema": SCHEMA,
        "family": FAMILY_GRAPH,
        "quantise": quantise,
        "components": {"model": model},
    }


def _input_entry(
    info: onnx.ValueInfoProto,
    role: str,
    shapes: Mapping[str, Sequence[int]],
    constants: Mapping[str, float],
) -> dict[str, Any]:
    if info.name in constants:
        return {"role": "constant", "value": constants[info.name]}
    return {"role": role, "shape": list(shapes[info.name])}


def _pinned(
    inputs: Sequence[onnx.ValueInfoProto], dims: Mapping[str, int], constants: Mapping[str, float]
) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    missing: list[FreeAxis] = []
    for info in inputs:
        if info.name in constants:
            continue
        tensor = info.type.tensor_type
        if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
            raise MalformedModelError(f"input {info.name!r} is not a tensor with a shape")
        sizes = []
        for axis, dim in enumerate(tensor.shape.dim):
            place = f"{info.name}:{axis}"
            given = dims.get(place, dims.get(dim.dim_param) if dim.dim_param else None)
            if dim.dim_value > 0:
                given = dims.get(place, dim.dim_value)
                if given != dim.dim_value:
                    raise MalformedModelError(f"{place} is {dim.dim_value}, it cannot be {given}")
            if given is None:
                missing.append(FreeAxis(info.name, axis, _usable(dim.dim_param)))
            sizes.append(int(given or 0))
        shapes[info.name] = sizes
    if missing:
        names = dict.fromkeys(axis.name or axis.how for axis in missing)
        raise MalformedModelError(
            "these sizes are free: " + ", ".join(axis.how for axis in missing),
            hint="give each one a size, by name or as input:axis, for example "
            + " ".join(f"--dim {name}=1" for name in list(names)[:3]),
        )
    return shapes


def _usable(name: str) -> str:
    """Return an axis name that says something; exporters write `?` for none."""
    return name if re.search(r"[A-Za-z0-9_]", name) else ""


def _check_names(
    inputs: Sequence[onnx.ValueInfoProto], dims: Mapping[str, int], constants: Mapping[str, float]
) -> None:
    named: set[str] = set()
    places = []
    for info in inputs:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            named.add(dim.dim_param)
            places.append(f"{info.name}:{axis}")
    _check_known("axis", dims, [*sorted(named - {""}), *places])
    _check_known("input", constants, [info.name for info in inputs])
    wrong = [name for name, size in dims.items() if size < 1]
    if wrong:
        raise MalformedModelError(
            f"size {dims[wrong[0]]} of {wrong[0]!r} is not positive",
            hint=f"give the size that the model will run with, for example --dim {wrong[0]}=8",
        )


def _check_known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a name that the file does not have: say which it has, and which was meant."""
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise MalformedModelError(
            f"the file has no {what} called {name!r}{meant}",
            hint=f"it has: {', '.join(known) or 'none'}",
        )


def _roles(infos: Sequence[onnx.ValueInfoProto], constants: Mapping[str, float]) -> list[str]:
    """Return `tensor` for the only tensor, else `tensor:<name>` with names made printable."""
    names = [info.name for info in infos if info.name not in constants]
    if len(names) == 1:
        return [ROLE_TENSOR for _ in infos]
    taken: set[str] = set()
    roles = []
    for info in infos:
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", info.name)[:MAX_ROLE_NAME] or "x"
        found, count = plain, 1
        while found in taken:
            count += 1
            suffix = f".{count}"
            found = plain[: MAX_ROLE_NAME - len(suffix)] + suffix
        taken.add(found)
        roles.append(f"{ROLE_TENSOR}:{found}")
    return roles
