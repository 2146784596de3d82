"""Where a bundle comes from: digests of everything that went in.

The document's SHA-256 stands in the signed manifest; the document itself goes into the report. It
holds digests and names only, no time and no path, so that the same input gives the same manifest.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, sha256_hex
from compiler.contract.plan_format import KvKind
from compiler.driver.external_data import external_files
from compiler.passes.pipeline_spec import PipelineSpec

SCHEMA: Final = "sparsefleet.provenance/1"
CALIBRATION: Final = "calibration"
MASKS: Final = "sparse_mask.bin"
"""Masks of weights, if the submission has any (`compiler.passes.inject_masks`)."""
_SOURCES: Final = ("*.py", "*.c.in", "products/*.json")
_TOOLS: Final = ("numpy", "onnx", "xdsl", "jinja2", "ziglang")


def model_digests(directory: Path, spec: PipelineSpec) -> dict[str, str]:
    """Return the SHA-256 of every file that the importer reads, by name.

    A file that is missing has none; the importer says what is wrong.
    """
    names = {"pipeline.json", MASKS}
    for component in spec.components:
        path = directory / component.file
        folder = Path(component.file).parent
        names.add(component.file)
        names.update(str(folder / name) for name in external_files(path))
    return {
        name: _file_digest(directory / name) for name in sorted(names) if _is_file(directory, name)
    }


def calibration_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of the files of the calibration set, by name; nothing without one."""
    names = [f"{CALIBRATION}{suffix}" for suffix in (".json", ".npz")]
    return {name: _file_digest(directory / name) for name in names if _is_file(directory, name)}


def section_digests(sections: Mapping[str, bytes] | None) -> dict[str, str]:
    """Return the SHA-256 of each section by component; nothing for no sections."""
    return {name: sha256_hex(data) for name, data in sorted((sections or {}).items())}


@cache
def compiler_digest() -> str:
    """Return the digest of the compiler's own sources and of the packages it works with."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(_sources(root)):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    for name in _TOOLS:
        digest.update(f"{name} {version(name)}\0".encode())
    return digest.hexdigest()


def tool_versions() -> dict[str, str]:
    """Return the versions of the packages that the output depends on."""
    return {name: version(name) for name in _TOOLS}


def provenance_document(
    inputs: Mapping[str, str],
    base: Mapping[str, str],
    target: str,
    vectors: int,
    accuracy_budget: float = 0.0,
    kv: KvKind = KvKind.F32,
    is_constant_time: bool = False,
    has_substitutes: bool = True,
) -> dict[str, Json]:
    """Return the provenance of one bundle.

    Args:
        inputs: Digests of the submission's files.
        base: Digests of the older bundle's sections whose grids were kept.
        target: Target id.
        vectors: The number of self-test vectors that was asked for.
        accuracy_budget: What removing heads and channels could lose; only named if something.
        kv: How keys and values are stored; only named if not as f32.
        is_constant_time: Whether a constant-time plan was asked for; only named if so.
        has_substitutes: Whether it may have substitutes of routers; only named if not.
    """
    lossy: dict[str, Json] = {"accuracy_budget": accuracy_budget} if accuracy_budget else {}
    lossy |= {"kv": kv.name} if kv else {}
    return {
        "schema": SCHEMA,
        "inputs": dict(inputs),
        "base": dict(base),
        "target": target,
        "selftest_vectors": vectors,
        "compiler_sha256": compiler_digest(),
        "tools": tool_versions(),
        **lossy,
        **({"constant_time": True} if is_constant_time else {}),
        **({} if has_substitutes else {"substitutes": False}),
    }


def _is_file(directory: Path, name: str) -> bool:
    """Return whether a name stays below the directory and is a file, links followed.

    The files of a submission may be links into a store of blobs: what they point at counts.
    """
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    return inside and (directory / name).is_file()


def _sources(root: Path) -> Iterable[Path]:
    for pattern in _SOURCES:
        yield from root.rglob(pattern)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
