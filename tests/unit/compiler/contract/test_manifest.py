"""The release manifest: byte vectors that are kept for ever, and what the parser gives back."""

import json
from pathlib import Path

import pytest

from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.manifest import (
    MAX_MANIFEST_BYTES,
    ReleaseManifest,
    Requirements,
    Section,
    parse_manifest,
    target_path,
)
from compiler.contract.planes import Plane

VECTORS = json.loads(
    (Path(__file__).parents[3] / "contract/vectors/manifest/cases.json").read_text()
)


def _case_bytes(case) -> bytes:
    unit, count = case.get("repeat", ("", 0))
    return (case["text"] or unit * count).encode()


@pytest.mark.parametrize("case", VECTORS["accepted"], ids=lambda case: case["name"])
def test_it_accepts_and_reproduces_the_vector(case) -> None:
    data = case["text"].encode()
    manifest = parse_manifest(data)
    assert manifest.to_bytes() == data
    assert manifest.sha256 == case["sha256"]


@pytest.mark.parametrize("case", VECTORS["refused"], ids=lambda case: case["name"])
def test_it_refuses_the_vector_with_a_contract_error(case) -> None:
    with pytest.raises(ContractError) as caught:
        parse_manifest(_case_bytes(case))
    assert caught.value.code == case["code"]


def test_it_reads_sections_planes_and_sizes() -> None:
    manifest = parse_manifest(VECTORS["accepted"][0]["text"].encode())
    expert = manifest.section("expert.L0.E0")
    assert expert.planes == (
        Plane("codes4", 0, 128),
        Plane("scales8", 128, 64),
        Plane("f32", 192, 64),
    )
    assert manifest.requires == Requirements(16 << 20, 4 << 20)
    assert manifest.total_bytes == 256 + 64 + 9000 + 10 + 1234 + 0 + 100


def test_it_names_the_missing_section() -> None:
    manifest = parse_manifest(VECTORS["accepted"][0]["text"].encode())
    with pytest.raises(ContractError, match=r"expert\.L9\.E9"):
        manifest.section("expert.L9.E9")


def test_it_refuses_a_huge_document_before_parsing_it() -> None:
    with pytest.raises(LimitExceededError):
        parse_manifest(b"{" + b" " * MAX_MANIFEST_BYTES)


def test_it_round_trips_what_a_builder_makes() -> None:
    manifest = ReleaseManifest(
        model="m",
        version="v",
        release_seq=7,
        security_epoch=2,
        target="aarch64",
        plan_abi=1,
        requires=Requirements(1, 2, 3),
        verified_on="qemu",
        sections=(Section("plan", 3, "ab" * 32),),
        provenance_sha256="cd" * 32,
    )
    assert parse_manifest(manifest.to_bytes()) == manifest


def test_it_makes_target_paths_without_free_text() -> None:
    assert target_path("edgecard", 3, "x86-64-v3") == "releases/edgecard/3-x86-64-v3.json"
