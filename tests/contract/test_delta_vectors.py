"""Delta files that were published once must apply for ever, and bad ones must stay refused."""

import base64
import io
import json
from pathlib import Path

import pytest

from compiler.contract.canonical import sha256_hex
from compiler.contract.delta import DeltaError, Mode, parse_header, read_records
from compiler.delta import MemorySections, apply_delta, verify_sections

VECTORS = Path(__file__).parent / "vectors" / "delta"
BOTH_WAYS = ["streams", "pieces-both-ways", "experts", "aligned-both-ways", "replayed", "sparse"]
GOOD = [*BOTH_WAYS, "pieces-forward", "aligned-forward", "nothing-changed"]


def _load(name: str):
    return json.loads((VECTORS / f"{name}.json").read_text())


def _sections(bundle) -> dict[str, bytes]:
    return {name: base64.b64decode(part["data"]) for name, part in bundle.items()}


@pytest.mark.parametrize("name", GOOD)
def test_it_applies_a_published_file(name):
    case = _load(name)
    data, old, new = base64.b64decode(case["delta"]), _sections(case["old"]), _sections(case["new"])
    sink = MemorySections()
    report = apply_delta(MemorySections(old), io.BytesIO(data), sink)
    verify_sections(report.header, sink)
    changed = {name for name in new if old.get(name) != new[name]}
    assert {result.component for result in report.sections} == changed
    assert {name: sink.section(name) for name in changed} == {name: new[name] for name in changed}


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_it_applies_a_published_file_backwards(name):
    case = _load(name)
    data, old, new = base64.b64decode(case["delta"]), _sections(case["old"]), _sections(case["new"])
    sink = MemorySections()
    report = apply_delta(MemorySections(new), io.BytesIO(data), sink, reverse=True)
    verify_sections(report.header, sink, reverse=True)
    assert report.sections
    for result in report.sections:
        assert sink.section(result.component) == old[result.component]


@pytest.mark.parametrize("name", GOOD)
def test_it_reads_the_header_of_a_published_file(name):
    case = _load(name)
    stream = io.BytesIO(base64.b64decode(case["delta"]))
    header = parse_header(stream.read)
    assert (
        sorted({record.mode.name for record, _ in read_records(stream.read, header)})
        == (case["modes"])
    )
    old, new = _sections(case["old"]), _sections(case["new"])
    header.require_bundles(
        {name: sha256_hex(data) for name, data in old.items()},
        {name: sha256_hex(data) for name, data in new.items()},
    )
    for section in header.sections:
        assert len(new[section.component]) == section.new_length
        assert len(old.get(section.component, b"")) == section.old_length
        if section.planes:
            assert (section.alignment is not None) == name.startswith("aligned")
            planes = [[plane.kind, plane.offset, plane.length] for plane in section.planes]
            assert planes == case["new"][section.component]["planes"]


def test_the_vectors_reach_every_mode():
    reached = {mode for name in GOOD for mode in _load(name)["modes"]}
    assert reached == {mode.name for mode in Mode}


@pytest.mark.parametrize("case", _load("bad")["cases"], ids=lambda case: case["why"])
def test_it_refuses_a_bad_file_with_the_published_code(case):
    old = _sections(_load("bad")["old"])
    with pytest.raises(DeltaError) as caught:
        apply_delta(
            MemorySections(old), io.BytesIO(base64.b64decode(case["delta"])), MemorySections()
        )
    assert caught.value.code == case["code"]
