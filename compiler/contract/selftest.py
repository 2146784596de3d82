"""The `selftest` section: inputs, and what the plan must answer to them, bit for bit.

    simulator -(runs)-> vectors -(sha256 in the signed manifest)-> device -(runs)-> same bits, or no
    activation

A vector is a sequence of runs of programs (see a picture, feed a prompt, feed the next tokens).
Each run names the cache length before it, its inputs, and the SHA-256 of every output. Inputs are
blobs, stored once each. The expected digests come from the bit-exact simulator at compile time; the
compiler runs the shipped native code against them before signing, and a device does before it
activates. Together the vectors reach every expert of every layer.

Schema `sparsefleet.selftest/1`, canonical JSON:
`{"schema", "experts": {"L<layer>": [expert ids reached]}, "blobs": [base64], "vectors": [{"name",
"runs": [{"program", "kv_length", "inputs": {role: blob number}, "outputs": {role: sha256}}]}]}`.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object, require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.fields import (
    require_fields,
    require_integer,
    require_list,
    require_object,
    require_text,
)
from compiler.contract.pipeline import MAX_PORTS
from compiler.contract.session import PlanRunner

SCHEMA: Final = "sparsefleet.selftest/1"
MAX_SELFTEST_BYTES: Final = 8 * 1024 * 1024
MAX_VECTORS: Final = 4096
MAX_RUNS: Final = 4096
MAX_BLOBS: Final = 65_536
MIN_VECTORS: Final = 16
MAX_NAME: Final = 96
MAX_REPORTED: Final = 16
_FIELDS: Final = frozenset(("schema", "experts", "blobs", "vectors"))
_VECTOR_FIELDS: Final = frozenset(("name", "runs"))
_RUN_FIELDS: Final = frozenset(("program", "kv_length", "inputs", "outputs"))


@dataclass(frozen=True, slots=True)
class SelfTestRun:
    """One run of a program.

    Attributes:
        kv_length: Cache rows to keep before the run.
        inputs: Raw bytes by role.
        outputs: Expected SHA-256 by role.
    """

    program: str
    kv_length: int
    inputs: Mapping[str, bytes]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SelfTestVector:
    """Runs that belong together, in order."""

    name: str
    runs: tuple[SelfTestRun, ...]


@dataclass(frozen=True, slots=True)
class SelfTest:
    """All vectors of a bundle.

    Attributes:
        experts: Expert ids reached, ascending, by decoder layer.
    """

    vectors: tuple[SelfTestVector, ...]
    experts: Mapping[int, tuple[int, ...]]

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the section."""
        blobs: dict[bytes, int] = {}
        vectors: list[Json] = [
            {
                "name": vector.name,
                "runs": [
                    {
                        "program": run.program,
                        "kv_length": run.kv_length,
                        "inputs": {
                            role: blobs.setdefault(data, len(blobs))
                            for role, data in sorted(run.inputs.items())
                        },
                        "outputs": dict(run.outputs),
                    }
                    for run in vector.runs
                ],
            }
            for vector in self.vectors
        ]
        return canonical_bytes(
            {
                "schema": SCHEMA,
                "experts": {f"L{layer}": list(ids) for layer, ids in self.experts.items()},
                "blobs": [base64.b64encode(blob).decode("ascii") for blob in blobs],
                "vectors": vectors,
            }
        )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One output that is not what was expected."""

    vector: str
    run: int
    program: str
    role: str
    expected: str
    actual: str


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What a self-test found.

    Attributes:
        vectors: Vectors that ran.
        runs: Native calls made.
        mismatches: The first `MAX_REPORTED` of them.
        failed_vectors: Vectors with at least one mismatch.
    """

    vectors: int
    runs: int
    failed_vectors: int
    mismatches: tuple[Mismatch, ...]

    @property
    def passed(self) -> bool:
        """Whether every output was as expected, and there was one."""
        return self.failed_vectors == 0 and self.runs > 0

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form, for logs and reports to the server."""
        return {
            "vectors": self.vectors,
            "runs": self.runs,
            "failed_vectors": self.failed_vectors,
            "mismatches": [
                {
                    "vector": item.vector,
                    "run": item.run,
                    "program": item.program,
                    "role": item.role,
                    "expected": item.expected,
                    "actual": item.actual,
                }
                for item in self.mismatches
            ],
        }


def run_selftest(runner: PlanRunner, data: bytes) -> SelfTestReport:
    """Run every vector of a `selftest` section and compare every output.

    Args:
        runner: The loaded plan. Its cache is empty afterwards.
        data: The section, digest verified.

    Raises:
        ContractError: The section is malformed. Errors of the runner pass through.
    """
    selftest = parse_selftest(data)
    mismatches: list[Mismatch] = []
    runs = failed = 0
    for vector in selftest.vectors:
        found = list(_vector_mismatches(runner, vector))
        runs += len(vector.runs)
        failed += bool(found)
        mismatches += found[: MAX_REPORTED - len(mismatches)]
    runner.kv_length = 0
    return SelfTestReport(len(selftest.vectors), runs, failed, tuple(mismatches))


def _vector_mismatches(runner: PlanRunner, vector: SelfTestVector) -> Iterator[Mismatch]:
    for at, run in enumerate(vector.runs):
        runner.kv_length = run.kv_length
        outputs = runner.run(run.program, run.inputs)
        actual = output_digests(outputs)
        for role, expected in sorted(run.outputs.items()):
            found = actual.get(role, "")
            if found != expected:
                yield Mismatch(vector.name, at, run.program, role, expected, found)


def output_digests(outputs: Mapping[str, memoryview]) -> dict[str, str]:
    """Return the SHA-256 of each output's raw bytes by role."""
    return {role: hashlib.sha256(data).hexdigest() for role, data in sorted(outputs.items())}


def parse_selftest(data: bytes) -> SelfTest:
    """Parse a `selftest` section.

    Raises:
        LimitExceededError: Longer than `MAX_SELFTEST_BYTES`, or a list beyond its limit.
        ContractError: Any field is missing, unknown, of the wrong type or out of range.
    """
    document = require_fields(
        parse_object(data, limit_bytes=MAX_SELFTEST_BYTES), _FIELDS, "selftest"
    )
    if document["schema"] != SCHEMA:
        raise ContractError(f"selftest schema {document['schema']!r}, expected {SCHEMA!r}")
    blobs = [_blob(item) for item in require_list(document["blobs"], "blobs", MAX_BLOBS)]
    vectors = require_list(document["vectors"], "vectors", MAX_VECTORS)
    return SelfTest(tuple(_vector(item, blobs) for item in vectors), _experts(document["experts"]))


def _blob(value: Json) -> bytes:
    try:
        return base64.b64decode(value if isinstance(value, str) else "?", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ContractError("a blob must be base64 text") from error


def _experts(value: Json) -> dict[int, tuple[int, ...]]:
    experts = {}
    for name, ids in require_object(value, "experts", 1 << 14).items():
        if not name[1:].isascii() or not name[1:].isdigit() or name != f"L{int(name[1:])}":
            raise ContractError(f"{name!r} is not a layer")
        numbers = [
            require_integer(item, "expert", 0, 1 << 14)
            for item in require_list(ids, "experts", 1 << 14)
        ]
        experts[int(name[1:])] = tuple(numbers)
    return experts


def _vector(value: Json, blobs: Sequence[bytes]) -> SelfTestVector:
    fields = require_fields(value, _VECTOR_FIELDS, "vector")
    runs = require_list(fields["runs"], "runs", MAX_RUNS)
    return SelfTestVector(
        require_text(fields["name"], "name", MAX_NAME), tuple(_run(item, blobs) for item in runs)
    )


def _run(value: Json, blobs: Sequence[bytes]) -> SelfTestRun:
    fields = require_fields(value, _RUN_FIELDS, "run")
    inputs = require_object(fields["inputs"], "inputs", MAX_PORTS)
    outputs = require_object(fields["outputs"], "outputs", MAX_PORTS)
    if not outputs:
        raise ContractError("a run that promises no output tests nothing")
    return SelfTestRun(
        program=require_text(fields["program"], "program", MAX_NAME),
        kv_length=require_integer(fields["kv_length"], "kv_length", 0, 1 << 20),
        inputs={
            role: blobs[require_integer(number, "blob number", 0, len(blobs) - 1)]
            for role, number in inputs.items()
        },
        outputs={role: require_sha256(digest, "output") for role, digest in outputs.items()},
    )
