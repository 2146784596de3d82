from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.canonical import sha256_hex
from compiler.contract.manifest import ReleaseManifest, Requirements, Section
from compiler.contract.protocol import DeltaOffer
from device_agent.update.plan import plan_fetch


def manifest(*contents: bytes) -> ReleaseManifest:
    sections = tuple(
        Section(f"expert.L0.E{number}", len(data), sha256_hex(data))
        for number, data in enumerate(contents)
    )
    return ReleaseManifest(
        "toy", "1", 1, 0, "x86-64-v1", 1, Requirements(0, 0), "host", sections, "0" * 64
    )


def delta(size: int) -> DeltaOffer:
    return DeltaOffer("1" * 64, "2" * 64, size)


def test_it_fetches_equal_sections_once() -> None:
    plan = plan_fetch(manifest(b"a", b"b", b"a"), lambda *_: False, None, base_here=False)
    assert [section.sha256 for section in plan.missing] == [sha256_hex(b"a"), sha256_hex(b"b")]
    assert plan.missing_bytes == 2


@given(
    contents=st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=6),
    here=st.sets(st.integers(0, 5)),
    size=st.integers(1, 40),
    base_here=st.booleans(),
)
def test_it_takes_a_delta_only_where_it_saves_something(
    contents: list[bytes], here: set[int], size: int, base_here: bool
) -> None:
    present = {sha256_hex(contents[number]) for number in here if number < len(contents)}
    bundle = manifest(*contents)
    plan = plan_fetch(
        bundle, lambda sha256, _size: sha256 in present, delta(size), base_here=base_here
    )
    missing = {section.sha256 for section in bundle.sections} - present
    assert {section.sha256 for section in plan.missing} == missing
    assert (plan.delta is not None) == (base_here and size < plan.missing_bytes)


def test_it_fetches_nothing_to_go_back_to_what_is_still_here() -> None:
    plan = plan_fetch(manifest(b"a", b"b"), lambda *_: True, delta(1), base_here=True)
    assert (plan.missing, plan.missing_bytes, plan.delta) == ((), 0, None)


def test_it_goes_back_by_a_delta_to_what_is_gone() -> None:
    plan = plan_fetch(manifest(b"a" * 100), lambda *_: False, delta(7), base_here=True)
    assert plan.delta == delta(7)
