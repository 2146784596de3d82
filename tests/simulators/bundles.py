"""Toy bundles: small, with the sections of a real one, run by `tests.simulators.engine`."""

import json
import random
from dataclasses import dataclass, field, replace

from compiler.contract.canonical import sha256_hex
from compiler.contract.manifest import ReleaseManifest, Requirements, Sealed, Section, target_path
from compiler.contract.planes import Plane
from compiler.contract.sealing import seal
from compiler.delta import EncodeOptions, SectionBytes, encode_delta, with_planes
from compiler.driver.options import CompiledBundle

CODES = 4096
SCALES = 256


@dataclass(frozen=True)
class ToyBundle:
    """A release manifest and its sections."""

    manifest: ReleaseManifest
    sections: dict[str, SectionBytes]
    boxes: dict[str, bytes] = field(default_factory=dict)

    @property
    def manifest_bytes(self) -> bytes:
        return self.manifest.to_bytes()

    @property
    def sha256(self) -> str:
        return self.manifest.sha256

    @property
    def path(self) -> str:
        return target_path(self.manifest.model, self.manifest.release_seq, self.manifest.target)

    @property
    def blobs(self) -> dict[str, bytes]:
        """Return digest -> bytes of what is on a device."""
        return {section.sha256: section.data for section in self.sections.values()}

    @property
    def travels(self) -> dict[str, bytes]:
        """Return digest -> bytes of what is downloaded."""
        return self.boxes or self.blobs


@dataclass(frozen=True)
class ToySpec:
    """What a toy bundle is made of.

    `behaviour` goes into the pipeline section and tells the toy engine how to act, see there.
    """

    version: str = "1"
    release_seq: int = 1
    seed: int = 1
    changed: int = 0
    experts: int = 2
    codes: int = CODES
    model: str = "toy"
    target: str = "x86-64-v1"
    security_epoch: int = 0
    plan_abi: int = 1
    requires: Requirements = field(default_factory=lambda: Requirements(1, 1))
    behaviour: dict[str, object] = field(default_factory=dict)


def toy_bundle(spec: ToySpec) -> ToyBundle:
    """Return the bundle of `spec`; the same spec gives the same bytes."""
    names = ["weights.shared", *(f"expert.L0.E{expert}" for expert in range(spec.experts))]
    sections = {name: _weights(f"{spec.seed}/{name}", spec) for name in names}
    sections["plan"] = SectionBytes(f"plan of {spec.version}".encode() * 8)
    sections["kernels"] = SectionBytes(b"kernels" * 64)
    sections["selftest"] = SectionBytes(b"vectors" * 16)
    sections["pipeline"] = SectionBytes(
        json.dumps({"version": spec.version, **spec.behaviour}, sort_keys=True).encode()
    )
    manifest = ReleaseManifest(
        model=spec.model,
        version=spec.version,
        release_seq=spec.release_seq,
        security_epoch=spec.security_epoch,
        target=spec.target,
        plan_abi=spec.plan_abi,
        requires=spec.requires,
        verified_on="host",
        sections=tuple(
            Section(name, len(item.data), item.sha256, item.planes)
            for name, item in sorted(sections.items())
        ),
        provenance_sha256=sha256_hex(b"toy"),
    )
    return ToyBundle(manifest, sections)


def released(compiled: CompiledBundle) -> ToyBundle:
    """Return a compiled bundle in the form that the release server publishes."""
    return ToyBundle(compiled.manifest, with_planes(compiled.manifest.sections, compiled.sections))


def sealed_toy(bundle: ToyBundle, key: bytes) -> ToyBundle:
    """Return a bundle as a confidential one, sealed with this content key."""
    boxes, rows = {}, []
    for row in bundle.manifest.sections:
        box = b"".join(seal(key, row.component, row.sha256, [bundle.blobs[row.sha256]]))
        boxes[sha256_hex(box)] = box
        rows.append(replace(row, sealed=Sealed(len(box), sha256_hex(box))))
    return replace(bundle, manifest=replace(bundle.manifest, sections=tuple(rows)), boxes=boxes)


def toy_delta(old: ToyBundle, new: ToyBundle) -> bytes:
    """Return the delta from one toy bundle to another."""
    options = EncodeOptions(try_bsdiff4=False)
    return encode_delta(old.sections, new.sections, options).data


def _weights(name: str, spec: ToySpec) -> SectionBytes:
    data = bytearray(random.Random(name).randbytes(spec.codes + SCALES))
    for position in random.Random(f"{name}/{spec.changed}").sample(range(spec.codes), spec.changed):
        data[position] ^= 0x11
    planes = (Plane("codes4", 0, spec.codes), Plane("scales8", spec.codes, SCALES))
    return SectionBytes(bytes(data), planes)
