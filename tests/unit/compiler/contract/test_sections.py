"""Documents of a bundle that a device parses: vectors kept for ever, and hostile bytes."""

import contextlib
import json
import random
from pathlib import Path

import pytest

from compiler.contract.bands import parse_bands
from compiler.contract.errors import ContractError
from compiler.contract.expert_groups import parse_expert_groups
from compiler.contract.manifest import parse_manifest
from compiler.contract.pipeline import parse_pipeline
from compiler.contract.router_stats import parse_router_stats
from compiler.contract.schedule import parse_schedule
from compiler.contract.selftest import parse_selftest
from compiler.contract.substitutes import parse_substitutes
from tests.unit.compiler.contract.test_expert_groups import GROUPS
from tests.unit.compiler.contract.test_pipeline import PIPELINE
from tests.unit.compiler.contract.test_router_stats import STATS
from tests.unit.compiler.contract.test_selftest import SELFTEST

VECTORS = Path(__file__).parents[3] / "contract" / "vectors"
MANIFESTS = json.loads((VECTORS / "manifest" / "cases.json").read_text())["accepted"]
PARSERS = {
    "manifest": (parse_manifest, MANIFESTS[0]["text"].encode()),
    "pipeline": (parse_pipeline, (VECTORS / "sections" / "pipeline.json").read_bytes()),
    "selftest": (parse_selftest, (VECTORS / "sections" / "selftest.json").read_bytes()),
    "router_stats": (
        parse_router_stats,
        (VECTORS / "sections" / "router_stats.json").read_bytes(),
    ),
    "bands": (parse_bands, (VECTORS / "sections" / "bands.json").read_bytes()),
    "substitutes": (parse_substitutes, (VECTORS / "sections" / "substitutes.json").read_bytes()),
    "schedule": (parse_schedule, (VECTORS / "sections" / "schedule.json").read_bytes()),
}
ODD_VALUES = (None, True, -1, 1 << 70, 1.5, "", "x", "\ud800", [], {}, [[]], {"a": {}})


def test_it_reads_the_pipeline_vector() -> None:
    assert parse_pipeline(PARSERS["pipeline"][1]) == PIPELINE


def test_it_reads_the_selftest_vector() -> None:
    data = PARSERS["selftest"][1]
    assert parse_selftest(data) == SELFTEST
    assert SELFTEST.to_bytes() == data


def test_it_reads_the_routing_vectors() -> None:
    data = PARSERS["router_stats"][1]
    assert parse_router_stats(data) == STATS
    assert STATS.to_bytes() == data
    data = (VECTORS / "sections" / "expert_groups.bin").read_bytes()
    assert parse_expert_groups(data) == GROUPS
    assert GROUPS.to_bytes() == data


@pytest.mark.parametrize("name", PARSERS)
def test_it_keeps_altered_bytes_inside_typed_errors(name) -> None:
    parse, good = PARSERS[name]
    source = random.Random(name)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(data))
            data[at : at + source.randint(0, 3)] = source.randbytes(source.randint(0, 3))
        with contextlib.suppress(ContractError):
            parse(bytes(data))


def _places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items if isinstance(value, dict | list) else ():
        yield from _places(item, (*path, key)) if isinstance(item, dict | list) else [(*path, key)]


@pytest.mark.parametrize("name", PARSERS)
def test_it_keeps_odd_values_at_every_place_inside_typed_errors(name) -> None:
    parse, good = PARSERS[name]
    for path in [place for place in _places(json.loads(good)) if place]:
        for odd in ODD_VALUES:
            document = json.loads(good)
            place = document
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = odd
            text = json.dumps(document, sort_keys=True, separators=(",", ":"))
            with contextlib.suppress(ContractError):
                parse(text.encode())
