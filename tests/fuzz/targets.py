"""What is fuzzed: each parser of bytes from outside, its examples, and how it may end.

A parser returns or raises an error of the project's own; anything else that leaves it (a KeyError,
a RecursionError, memory out of proportion) is a fault. What stands behind a checksum is reached by
mending the checksum. Used by `tests.fuzz` (guided by coverage, for a while) and by `test_corpus`
(every day, over the inputs that are kept).
"""

import base64
import io
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, Root, TargetFile, Targets
from tuf.api.serialization import SerializationError

from builds.common.errors import ApplicationError
from builds.onnx_outline import require_onnx
from compiler.contract.bands import parse_bands
from compiler.contract.canonical import canonical_bytes, parse_object
from compiler.contract.degrade import SIGNALS, parse_rules
from compiler.contract.errors import ContractError
from compiler.contract.expert_groups import parse_expert_groups
from compiler.contract.fingerprint import Fingerprint, parse_fingerprint
from compiler.contract.manifest import parse_manifest
from compiler.contract.pipeline import parse_pipeline
from compiler.contract.plan import parse_plan
from compiler.contract.policy import parse_policy
from compiler.contract.protocol import (
    Assignment,
    DeltaOffer,
    OfferKind,
    parse_poll_answer,
    parse_report,
)
from compiler.contract.router_stats import parse_router_stats
from compiler.contract.rule_language import parse_condition
from compiler.contract.rules_order import RULES_PATH, RulesOrder
from compiler.contract.schedule import parse_schedule
from compiler.contract.selftest import parse_selftest
from compiler.contract.steering_points import Point, SteeringPoints, parse_steering_points
from compiler.contract.substitutes import parse_substitutes
from compiler.contract.telemetry import Sketch, TelemetryBatch, parse_batch
from compiler.delta import MemorySections, apply_delta
from compiler.delta.bsdiff import apply_bsdiff4, make_bsdiff4
from compiler.errors import CompilerError
from compiler.frontend import pipeline_json
from compiler.frontend.onnx_file import read_model
from device_agent.errors import AgentError
from device_agent.storage.disk import Disk
from device_agent.storage.floors import Floors, floors_from_json
from device_agent.storage.journal import read_records
from device_agent.storage.slots import Pointer, SlotTable, table_from_json
from device_agent.storage.twin import TwinDocument
from device_agent.update.context import UpdateContext, context_from_json
from device_agent.update.director import Expected, verify_assignment, verify_rules

HERE: Final = Path(__file__).parent
CORPUS: Final = HERE / "corpus"
VECTORS: Final = HERE.parents[1] / "tests" / "contract" / "vectors"
OWN: Final = (ContractError, CompilerError, AgentError, ApplicationError)
"""Errors that say what is wrong with an input."""

Parse = Callable[[bytes], object]
Examples = Callable[[], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class Target:
    """One parser.

    Attributes:
        parse: Takes any bytes.
        examples: Inputs to start from, as they come from outside.
        may_raise: How it says that an input is bad.
    """

    parse: Parse
    examples: Examples
    may_raise: tuple[type[Exception], ...] = OWN

    def outcome(self, data: bytes) -> str:
        """Return `read`, or the name of the error that refused the input.

        Raises:
            Exception: Any other error: a fault.
        """
        try:
            self.parse(data)
        except self.may_raise as error:
            return type(error).__name__
        return "read"


def vectors(folder: str, *names: str) -> Examples:
    """Return the files of a folder of vectors, all or those named."""

    def files() -> Iterator[bytes]:
        found = [VECTORS / folder / name for name in names] or (VECTORS / folder).iterdir()
        yield from (path.read_bytes() for path in sorted(found) if path.suffix != ".py")

    return files


def documents(*documents: Mapping[str, object]) -> Examples:
    """Return documents as canonical JSON."""
    return lambda: iter([json.dumps(item, sort_keys=True).encode() for item in documents])


def _manifests() -> Iterator[bytes]:
    cases = json.loads((VECTORS / "manifest" / "cases.json").read_text())
    for case in [*cases["accepted"], *cases["refused"]]:
        yield case["text"].encode()


def _deltas() -> Iterator[bytes]:
    for path in sorted((VECTORS / "delta").glob("*.json")):
        found = json.loads(path.read_text())
        if {"old", "delta"} <= found.keys():
            yield base64.b64decode(found["delta"])


def _plans() -> Iterator[bytes]:
    for path in sorted((VECTORS / "plan").glob("*.json")):
        yield bytes.fromhex(json.loads(path.read_text()).get("plan", ""))


@cache
def _streams() -> Any:
    return json.loads((VECTORS / "delta" / "streams.json").read_text())


@cache
def _base() -> dict[str, bytes]:
    old = _streams()["old"]
    return {name: base64.b64decode(section["data"]) for name, section in old.items()}


def _apply(data: bytes) -> None:
    apply_delta(MemorySections(_base()), io.BytesIO(data), MemorySections())


_TABLE_AT: Final = 36
"""Bytes before the deflated table of a delta, see docs/formats/delta.md."""


def _apply_table(table: bytes) -> None:
    """Apply a delta whose table is the input, deflated, with its lengths mended."""
    whole = base64.b64decode(_streams()["delta"])
    head = bytearray(whole[:_TABLE_AT])
    stored = zlib.compress(table)
    old = int.from_bytes(head[32:36], "little")
    length = int.from_bytes(head[8:16], "little") + len(stored) - old
    head[8:16] = length.to_bytes(8, "little")
    head[28:32] = len(table).to_bytes(4, "little")
    head[32:36] = len(stored).to_bytes(4, "little")
    _apply(bytes(head) + stored + whole[_TABLE_AT + old :])


def _tables() -> Iterator[bytes]:
    for whole in _deltas():
        if not (stored := int.from_bytes(whole[32:36], "little")):
            continue
        yield zlib.decompress(whole[_TABLE_AT : _TABLE_AT + stored])


_SOURCE: Final = bytes(range(256)) * 4
_MADE: Final = _SOURCE[:500] + b"something else" + _SOURCE[480:]


def _patches() -> Iterator[bytes]:
    patch = make_bsdiff4(_SOURCE, _MADE)
    if patch is not None:
        yield patch


def _journal(data: bytes) -> None:
    records, _ = read_records(b"".join(_mended(line) for line in data.split(b"\n")))
    for record in records:
        context_from_json(record)


def _mended(line: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(line), line)


def _twin(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        document = TwinDocument(Disk(), folder, "state")
        (folder / "state.0").write_bytes(data)
        (folder / "state.1").write_bytes(
            b"SFT1 7 %d %08x\n%s" % (len(data), zlib.crc32(data), data)
        )
        document.load()


def _onnx(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.onnx"
        path.write_bytes(data)
        read_model(path)


def _models() -> Iterator[bytes]:
    yield (HERE.parents[1] / "examples" / "edgecard" / "vision.skel.onnx").read_bytes()[:4096]
    yield b"\x08\x0a\x12\x04test\x3a\x02\x12\x00\x42\x02\x10\x15"


@cache
def _director() -> tuple[bytes, CryptoSigner]:
    signer = CryptoSigner.generate_ed25519()
    root = Root(version=1, expires=datetime.now(UTC) + timedelta(days=3650))
    for role in (Root.type, Targets.type):
        root.add_key(signer.public_key, role)
    signed = Metadata(root)
    signed.sign(signer)
    return signed.to_bytes(), signer


def _expected() -> Expected:
    return Expected("0" * 64, "0" * 64, "0" * 32, datetime.now(UTC))


def _directed(data: bytes) -> None:
    verify_assignment(data, _director()[0], lambda _version: None, _expected())


def _signed(verify: Callable[..., object], path: str) -> Parse:
    """Return what verifies a document signed by the director whose custom part is the input."""

    def parse(data: bytes) -> object:
        root, signer = _director()
        target = TargetFile(10, {"sha256": "0" * 64}, path, {"custom": parse_object(data)})
        soon = datetime.now(UTC) + timedelta(days=1)
        signed = Metadata(Targets(1, expires=soon, targets={path: target}))
        try:
            signed.sign(signer)
        except SerializationError:  # a fraction, for example: nobody can sign it
            return None
        return verify(signed.to_bytes(), root, lambda _version: None, _expected())

    return parse


def _orders() -> Iterator[bytes]:
    offer = DeltaOffer("0" * 64, "1" * 64, 900)
    for delta in (None, offer):
        order = Assignment("0" * 64, "0" * 64, 1, "0" * 32, OfferKind.INSTALL, 1, delta)
        yield canonical_bytes(order.to_json())


def _rules_orders() -> Iterator[bytes]:
    yield canonical_bytes(RulesOrder("0" * 64, "0" * 64, "0" * 32, 1, None).to_json())


def _condition(data: bytes) -> None:
    parse_condition(data.decode("utf-8", "replace"), SIGNALS)


def _texts() -> Iterator[bytes]:
    yield b"fragmentation > 30 %"
    yield b"temperature > 55 C for 10 s and (battery < 15 % or rate(faults) >= 0.5)"


_POLL: Final = {
    "poll_after_s": 30,
    "arm": "treatment",
    "rollout_id": 1,
    "stage": 0,
    "offer": {
        "update_id": 1,
        "attempt": 1,
        "kind": "install",
        "version": "2",
        "manifest_sha256": "0" * 64,
    },
}
_REPORT: Final = {
    "schema": "sparsefleet.report/1",
    "update_id": 1,
    "attempt": 1,
    "seq": 1,
    "state": "failed",
    "running_manifest_sha256": "",
    "downloaded_bytes": 0,
    "code": "agent.error",
    "message": "",
}
_SLOTS: Final = SlotTable("a", Pointer("0" * 64, 900, "2", 1), Pointer("1" * 64, 800, "1", 1))
_UPDATE: Final = UpdateContext(1, 1, OfferKind.INSTALL, "2", "0" * 64)
_FINGERPRINT: Final = Fingerprint(
    *("x86_64", "a processor", "linux", ("avx2", "fma"), 2, 32, 512, 4096, 4096, 4),
    *("none", "", "pc", 1),
)
_TELEMETRY: Final = TelemetryBatch(
    boot_id="bootaaaa",
    seq=0,
    manifest_sha256="0" * 64,
    rollout_id=None,
    stage=None,
    arm="",
    answers=1,
    failures=0,
    scored=1,
    correct=1,
    degraded=0,
    latency_ms=Sketch(),
)
_STEERING: Final = SteeringPoints(
    *(1000, 900, 500, 500, 5_000, 10_000, 0, 0),
    (Point(), Point(pull=300, better=5, worse=1, misses=900)),
)

TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        "bands": Target(parse_bands, vectors("sections", "bands.json")),
        "substitutes": Target(parse_substitutes, vectors("sections", "substitutes.json")),
        "bsdiff4": Target(lambda data: apply_bsdiff4(data, _SOURCE, len(_MADE)), _patches),
        "condition": Target(
            lambda data: parse_condition(data.decode("utf-8", "replace"), SIGNALS), _texts
        ),
        "assignment": Target(_signed(verify_assignment, "releases/m/1-x.json"), _orders),
        "degrade": Target(parse_rules, documents({"schema": "sparsefleet.degrade/1", "rules": []})),
        "delta": Target(_apply, _deltas),
        "delta_table": Target(_apply_table, _tables),
        "director": Target(_directed, lambda: iter([_director()[0]])),
        "expert_groups": Target(parse_expert_groups, vectors("sections", "expert_groups.bin")),
        "fingerprint": Target(parse_fingerprint, documents(_FINGERPRINT.to_json())),
        "floors": Target(
            lambda data: floors_from_json(parse_object(data)), documents(Floors().to_json())
        ),
        "journal": Target(_journal, documents(_UPDATE.to_json())),
        "manifest": Target(parse_manifest, _manifests),
        "onnx": Target(_onnx, _models),
        "onnx_outline": Target(lambda data: require_onnx(io.BytesIO(data), "model.onnx"), _models),
        "pipeline": Target(parse_pipeline, vectors("sections", "pipeline.json")),
        "plan": Target(parse_plan, _plans),
        "policy": Target(parse_policy, vectors("policy", "table.bin")),
        "poll": Target(parse_poll_answer, documents(_POLL)),
        "report": Target(parse_report, documents(_REPORT)),
        "router_stats": Target(parse_router_stats, vectors("sections", "router_stats.json")),
        "rules_order": Target(_signed(verify_rules, RULES_PATH), _rules_orders),
        "schedule": Target(parse_schedule, vectors("sections", "schedule.json")),
        "selftest": Target(parse_selftest, vectors("sections", "selftest.json")),
        "slots": Target(
            lambda data: table_from_json(parse_object(data)), documents(_SLOTS.to_json())
        ),
        "steering": Target(parse_steering_points, lambda: iter([_STEERING.to_bytes()])),
        "submission": Target(pipeline_json.parse_pipeline, documents({})),
        "telemetry": Target(parse_batch, lambda: iter([_TELEMETRY.to_bytes()])),
        "twin": Target(_twin, documents({})),
    }
)
