"""Reading one ONNX file of a submission: untrusted bytes in, a checked `ModelProto` out.

    bytes -> parse -> size and nesting -> ONNX checker -> inline functions -> external data

The importer calls `read_model` once per component. Each step only sees what the step before it let
through; in particular the checker and the inliner, which are C++, never see a function that calls
itself or a file with more nodes than the limits allow.
"""

from collections import Counter
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import inliner

from compiler.errors import MalformedModelError
from compiler.frontend.external_data import external_names, load_external_data
from compiler.frontend.limits import DEFAULT_LIMITS, ImportLimits, exceeded
from compiler.frontend.model_size import check_size

MIN_OPSET: Final = 11
MAX_OPSET: Final = 28
SPARSEFLEET_DOMAIN: Final = "ai.sparsefleet"
KNOWN_FUNCTIONS: Final = frozenset(
    {"MoERouter", "MoEExpert", "DynamicPrune", "SparseConv", "SparseAttention", "DynamicTopK"}
)
CONTRIB_DOMAIN: Final = "com.microsoft"
MISPLACED: Final = frozenset({"SimplifiedLayerNormalization"})
"""Operators of ONNX Runtime that its builders write into the default domain."""
SET_ASIDE_BYTES: Final = 1 << 16
DEFAULT_DOMAINS: Final = frozenset({"", "ai.onnx"})


def read_model(path: Path, limits: ImportLimits = DEFAULT_LIMITS) -> onnx.ModelProto:
    """Read, check and simplify one ONNX file.

    Functions local to the model are inlined, except the operators of domain `ai.sparsefleet`.

    Raises:
        MalformedModelError: Unreadable, truncated, not ONNX, external data missing or outside the
            directory, opset outside 13 to 28, or refused by the ONNX checker.
        LimitError: Larger than a limit allows.
    """
    model = _parse(path, limits)
    if not model.HasField("graph") or not model.graph.output:
        raise MalformedModelError(
            f"{path.name} is not an ONNX model: it has no graph with outputs",
            hint="the upload may be truncated or of another format; send the exporter's file",
        )
    _check_opset(model, path.name)
    check_size(model, path.name, limits)
    _check_names(model, path.name)
    _rename_misplaced(model)
    load_external_data(model, path.parent, path.name, limits)
    aside = _set_aside(model)
    _check(model, path.name)
    inlined = _inline(model, path.name)
    for initializer in inlined.graph.initializer:
        if initializer.name in aside:
            dims, initializer.raw_data = aside[initializer.name]
            initializer.dims[:] = dims
    return inlined


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the default operator set, 0 if the model imports none."""
    versions = [o.version for o in model.opset_import if o.domain in DEFAULT_DOMAINS]
    return versions[0] if versions else 0


def external_files(path: Path) -> tuple[str, ...]:
    """Return the names of the data files that an ONNX file refers to, each once.

    They are the files that `read_model` reads beside it, and all lie below its directory.

    Raises:
        MalformedModelError: The file cannot be read, or a name is missing or leaves the directory.
    """
    return external_names(_parse(path, DEFAULT_LIMITS), path.parent, path.name)


def _parse(path: Path, limits: ImportLimits) -> onnx.ModelProto:
    truncated = "the upload may be truncated or of another format; send the exporter's file"
    try:
        size = path.stat().st_size
        if size > limits.max_file_bytes:
            raise exceeded("max_file_bytes", f"{path.name} has {size} bytes", limits)
        if size == 0:
            raise MalformedModelError(f"{path.name} is empty", hint=truncated)
        return onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise MalformedModelError(
            f"{path.name} cannot be read: {error.strerror}",
            hint="pipeline.json names a file that is not in the submission",
        ) from error
    except (DecodeError, ValueError) as error:
        raise MalformedModelError(f"{path.name} is not an ONNX file", hint=truncated) from error


def _check_names(model: onnx.ModelProto, name: str) -> None:
    counts = Counter(initializer.name for initializer in model.graph.initializer)
    counts.update(sparse.values.name for sparse in model.graph.sparse_initializer)
    for kind, infos in (("input", model.graph.input), ("output", model.graph.output)):
        for given, times in Counter(info.name for info in infos).items():
            if times > 1:
                raise MalformedModelError(f"{name} has {kind} {given!r} {times} times")
    twice = [given for given, times in counts.items() if times > 1]
    if twice:
        raise MalformedModelError(f"{name} has initializer {twice[0]!r} twice")


def _rename_misplaced(model: onnx.ModelProto) -> None:
    """Move operators of ONNX Runtime that stand in the default domain to its own."""
    nodes = [n for n in model.graph.node if n.op_type in MISPLACED and n.domain in DEFAULT_DOMAINS]
    for node in nodes:
        node.domain = CONTRIB_DOMAIN
    if nodes and all(entry.domain != CONTRIB_DOMAIN for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(CONTRIB_DOMAIN, 1))


def _set_aside(model: onnx.ModelProto) -> dict[str, tuple[list[int], bytes]]:
    """Take large initializers' bytes out of a model; return sizes and bytes by name.

    Checker and inliner get the model as one message, which holds 2 GiB at most and is copied
    several times; an initializer of no elements stands for the large one.
    """
    aside = {}
    for initializer in model.graph.initializer:
        if initializer.name and len(initializer.raw_data) > SET_ASIDE_BYTES:
            aside[initializer.name] = (list(initializer.dims), initializer.raw_data)
            initializer.dims[:] = [0]
            initializer.raw_data = b""
    return aside


def _check(model: onnx.ModelProto, name: str) -> None:
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "invalid model"
        raise MalformedModelError(f"{name} is not valid ONNX: {reason}") from error


def _check_opset(model: onnx.ModelProto, name: str) -> None:
    version = opset_of(model)
    if not MIN_OPSET <= version <= MAX_OPSET:
        raise MalformedModelError(
            f"{name} uses opset {version}, supported are {MIN_OPSET} to {MAX_OPSET}",
            hint=f"export again with an opset from {MIN_OPSET} to {MAX_OPSET}",
        )


def _inline(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    if not model.functions:
        return model
    kept = [(SPARSEFLEET_DOMAIN, function) for function in sorted(KNOWN_FUNCTIONS)]
    try:
        return inliner.inline_selected_functions(model, kept, exclude=True)
    except (ValueError, RuntimeError) as error:
        raise MalformedModelError(f"functions of {name} cannot be inlined: {error}") from error
