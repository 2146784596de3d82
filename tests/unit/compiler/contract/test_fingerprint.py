"""Fingerprints: one canonical form, buckets, and the ladder of targets."""

import dataclasses
import json

import pytest

from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.fingerprint import (
    MAX_FEATURES,
    TARGET_LADDER,
    Fingerprint,
    parse_fingerprint,
    ram_bucket_mb,
    target_of,
)
from compiler.hardware.targets import TARGETS

PLAIN = Fingerprint(
    machine="x86_64",
    soc="A processor",
    os="linux",
    isa_features=("sse2", "avx"),
    cores=2,
    l1d_kb=32,
    l2_kb=1024,
    l3_kb=0,
    ram_bucket_mb=4096,
    page_kb=4,
    accelerator="",
    driver="",
    device_class="pc",
    agent_abi=1,
)
LADDER = {target: features for target, _, features in TARGET_LADDER}


def _with(**changes) -> Fingerprint:
    return dataclasses.replace(PLAIN, **changes)


def test_it_round_trips_and_keeps_its_identity() -> None:
    parsed = parse_fingerprint(PLAIN.to_bytes())
    assert parsed.isa_features == ("avx", "sse2")
    assert parsed.sha256 == PLAIN.sha256
    assert PLAIN.sha256 == "2e648d1def1b91af74bc96aa51743f0e22687aa789aa89258f1c9fca4f6124fe"


def test_it_has_one_identity_whatever_the_order_of_features() -> None:
    shuffled = _with(isa_features=("avx", "sse2", "avx"))
    assert shuffled.sha256 == PLAIN.sha256
    assert _with(cores=4).sha256 != PLAIN.sha256


@pytest.mark.parametrize(
    ("machine", "features", "target"),
    [
        ("x86_64", LADDER["x86-64-v4-vnni"] | {"sse2"}, "x86-64-v4-vnni"),
        ("x86_64", LADDER["x86-64-v4-vnni"] - {"avx512_vnni"}, "x86-64-v3"),
        ("x86_64", LADDER["x86-64-v3"], "x86-64-v3"),
        ("x86_64", LADDER["x86-64-v3"] - {"fma"}, "x86-64-v2"),
        ("x86_64", LADDER["x86-64-v2"], "x86-64-v2"),
        ("x86_64", {"sse2"}, "x86-64-v1"),
        ("aarch64", {"asimd", "asimddp"}, "aarch64-dotprod"),
        ("aarch64", {"asimd"}, "aarch64"),
        ("aarch64", LADDER["x86-64-v3"], "aarch64"),
    ],
)
def test_it_picks_the_best_target_that_runs(machine, features, target) -> None:
    assert target_of(_with(machine=machine, isa_features=tuple(features))) == target


def test_it_tells_a_machine_without_a_target() -> None:
    with pytest.raises(ContractError, match="sparc64") as caught:
        target_of(_with(machine="sparc64"))
    assert "x86_64" in caught.value.hint


@pytest.mark.parametrize(
    ("total", "bucket"), [(100, 512), (512, 512), (1023, 512), (7900, 4096), (10**9, 131072)]
)
def test_it_rounds_memory_down_to_a_bucket(total, bucket) -> None:
    assert ram_bucket_mb(total) == bucket


@pytest.mark.parametrize(
    "change",
    [
        {"cores": -1},
        {"cores": True},
        {"cores": 2.0},
        {"cores": "2"},
        {"soc": "x" * 97},
        {"soc": "a\nb"},
        {"soc": 3},
        {"isa_features": "avx"},
        {"isa_features": [1]},
        {"isa_features": ["f"] * (MAX_FEATURES + 1)},
        {"schema": "sparsefleet.fingerprint/2"},
        {"bandwidth": 3},
    ],
)
def test_it_refuses_a_broken_field(change) -> None:
    document = json.loads(PLAIN.to_bytes()) | change
    with pytest.raises(ContractError):
        parse_fingerprint(json.dumps(document).encode())


@pytest.mark.parametrize("name", sorted(PLAIN.to_json()))
def test_it_refuses_a_missing_field(name) -> None:
    document = PLAIN.to_json()
    del document[name]
    with pytest.raises(ContractError):
        parse_fingerprint(json.dumps(document).encode())


def test_it_refuses_a_huge_document() -> None:
    with pytest.raises(LimitExceededError):
        parse_fingerprint(b" " * 20_000 + PLAIN.to_bytes())


def test_it_knows_the_targets_that_the_compiler_builds() -> None:
    built = {target.id: target for target in TARGETS}
    assert set(built) == set(LADDER)
    for target_id, machine, features in TARGET_LADDER:
        assert built[target_id].arch == machine
        # what every machine of the architecture has need not be reported
        assert built[target_id].features - features <= {"sse2", "asimd"}
        assert features <= built[target_id].features
