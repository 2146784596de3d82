"""Reading one ONNX file of a submission: untrusted bytes in, a checked `ModelProto` out."""

from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import inliner

from compiler.errors import MalformedModelError

MIN_OPSET: Final = 13
MAX_OPSET: Final = 28
SPARSEFLEET_DOMAIN: Final = "ai.sparsefleet"
KNOWN_FUNCTIONS: Final = frozenset({"MoERouter", "MoEExpert", "DynamicPrune"})
DEFAULT_DOMAINS: Final = frozenset({"", "ai.onnx"})


def read_model(path: Path) -> onnx.ModelProto:
    """Read, check and simplify one ONNX file.

    Functions local to the model are inlined, except those of domain `ai.sparsefleet` that we have
    kernels for.

    Raises:
        MalformedModelError: Unreadable, truncated, not ONNX, external data missing or outside the
            directory, opset outside 13 to 28, or refused by the ONNX checker.
    """
    model = _parse(path)
    if not model.HasField("graph") or not model.graph.output:
        raise MalformedModelError(
            f"{path.name} is not an ONNX model: it has no graph with outputs",
            hint="the upload may be truncated or of another format; send the exporter's file",
        )
    _check_opset(model, path.name)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "invalid model"
        raise MalformedModelError(f"{path.name} is not valid ONNX: {reason}") from error
    return _inline(model, path.name)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the default operator set, 0 if the model imports none."""
    versions = [o.version for o in model.opset_import if o.domain in DEFAULT_DOMAINS]
    return versions[0] if versions else 0


def _parse(path: Path) -> onnx.ModelProto:
    truncated = "the upload may be truncated or of another format; send the exporter's file"
    try:
        if path.stat().st_size == 0:
            raise MalformedModelError(f"{path.name} is empty", hint=truncated)
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise MalformedModelError(
            f"{path.name} cannot be read: {error.strerror}",
            hint="pipeline.json names a file that is not in the submission",
        ) from error
    except (DecodeError, ValueError) as error:
        raise MalformedModelError(f"{path.name} is not an ONNX file", hint=truncated) from error
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, onnx.checker.ValidationError, ValueError) as error:
        raise MalformedModelError(
            f"external data of {path.name} is missing or out of place",
            hint="send the data file beside the model, in the same directory",
        ) from error
    return model


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
