"""Bundles that differ in single experts share the others in memory, while one of them runs."""

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from compiler.contract.canonical import sha256_hex
from compiler.contract.native import NativePlan
from compiler.contract.native_weights import LoadedWeights
from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import align
from device_agent.runtime.weights import MOST_KEPT, WeightPool
from tests.factories.kernels import PORTABLE, Case, library
from tests.integration.test_native_pool import conversation, decoder, scheduled, talk

Sections = Mapping[str, bytes]


class Bundles:
    """Versions of one model whose experts change one by one."""

    def __init__(self) -> None:
        case = Case.of(scheduled(decoder()))
        self.kernels = library(PORTABLE)
        self.plan_bytes = case.emitted.plan_bytes
        self.plan = parse_plan(self.plan_bytes)
        self.first: Sections = dict(case.emitted.sections)
        self.experts = sorted(s.name for s in self.plan.sections if s.name.startswith("expert."))
        self.whole = sum(align(section.length) for section in self.plan.sections)
        self.pool = WeightPool()

    def changed(self, sections: Sections, name: str, by: int = 1) -> Sections:
        """Return a version in which one code of an expert moved."""
        data = bytearray(sections[name])
        data[5] ^= by
        return {**sections, name: bytes(data)}

    def load(self, sections: Sections) -> LoadedWeights:
        digests = {name: sha256_hex(data) for name, data in sections.items()}
        weights = self.pool.load(
            self.plan,
            digests,
            self.kernels,
            lambda lent: LoadedWeights(self.plan.sections, sections, lent),
        )
        assert isinstance(weights, LoadedWeights)
        for name in weights.names:
            assert weights.section(name) == sections[name]
        return weights

    @contextmanager
    def running(self, weights: LoadedWeights) -> Iterator[NativePlan]:
        with NativePlan(self.kernels, self.plan_bytes, weights) as plan:
            yield plan

    def says(self, sections: Sections) -> object:
        """Return what a plan that has its own memory says."""
        with self.running(LoadedWeights(self.plan.sections, sections)) as plan:
            return talk(plan, conversation())


def test_only_what_changed_is_copied_and_the_answers_are_those_of_a_fresh_start() -> None:
    at = Bundles()
    second = at.changed(at.first, at.experts[0])
    expected = at.says(at.first), at.says(second)
    assert expected[0] != expected[1]
    old = at.load(at.first)
    new = at.load(second)
    assert len(new.memory.view) == align(len(second[at.experts[0]]))
    assert new.lent_bytes == sum(
        section.length for section in at.plan.sections if section.name != at.experts[0]
    )
    with at.running(old) as before, at.running(new) as after:
        assert (talk(before, conversation()), talk(after, conversation())) == expected
    del old, before
    gc.collect()
    with at.running(new) as after:
        assert talk(after, conversation()) == expected[1]


def test_the_old_bundle_answers_all_the_while() -> None:
    at = Bundles()
    expected = at.says(at.first)
    wrong: list[object] = []
    asked, ends = threading.Event(), threading.Event()

    def ask(plan: NativePlan) -> None:
        while not ends.is_set():
            plan.kv_length = 0
            if (found := talk(plan, conversation())) != expected:
                wrong.append(found)
            asked.set()

    with at.running(at.load(at.first)) as plan:
        thread = threading.Thread(target=ask, args=(plan,))
        thread.start()
        try:
            version = at.first
            for number in range(20):
                version = at.changed(version, at.experts[number % len(at.experts)], 3)
                asked.wait(60)
                with at.running(at.load(version)) as other:
                    assert talk(other, conversation()) == at.says(version)
        finally:
            ends.set()
            thread.join()
    assert not wrong


def test_many_updates_of_single_experts_do_not_pile_up() -> None:
    at = Bundles()
    version, weights = at.first, at.load(at.first)
    copied = []
    for number in range(3 * len(at.experts)):
        version = at.changed(version, at.experts[number % len(at.experts)], 1 + number // 7)
        weights = at.load(version)
        gc.collect()
        assert weights.size <= MOST_KEPT * at.whole
        copied.append(len(weights.memory.view))
    assert min(copied) < at.whole / 4, "most updates copy one expert"
    assert at.whole in copied, "now and then all are copied together"


def test_a_damaged_section_is_not_lent() -> None:
    at = Bundles()
    old = at.load(at.first)
    old.damaged.add(at.experts[1])
    old.section(at.experts[1])[:1] = b"\xff"
    second = at.changed(at.first, at.experts[0])
    assert at.says(second) != at.says(at.first)
    new = at.load(second)
    assert new.section(at.experts[1]) == second[at.experts[1]]


def test_the_same_weights_are_one() -> None:
    at = Bundles()
    assert at.load(at.first) is at.load(dict(at.first))
