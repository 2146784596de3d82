"""Experts within a budget: the same bits as with all in memory, whatever goes wrong below."""

import os
import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pytest

from compiler.contract.expert_pool import ExpertDamagedError, ExpertFile, ExpertPool, ReadAhead
from compiler.contract.native import NativePlan
from compiler.contract.native_errors import ExpertAbsentError, NativeError
from compiler.contract.native_library import KernelLibrary
from compiler.contract.pool_abi import NO_GROUP, ExpertState, PoolKnob
from compiler.contract.pooled_weights import PooledWeights
from compiler.emitters.schedule import obey, schedule_ops
from compiler.kernels.program import TILES, Module, NormKind, Weight
from tests.factories.checked_kernels import compared_in
from tests.factories.kernels import PORTABLE, Case, ids, library, native_targets, raw
from tests.factories.modules import DecoderBuilder
from tests.factories.pools import RUN, memory_file, pooled
from tests.integration.test_native_fused import moe

LIKELY = {"step": {0: (1,), 1: (0, 2), 2: (3,)}}
RUNS = (5, 1, 1, 7, 1, 1, 1, 16, 1, 1)
SHARES = (0.25, 0.5, 0.75)


def decoder(seed: int = 3) -> Module:
    builder = DecoderBuilder(seed, layers=3, experts=8, hidden=96)
    builder.add_step()
    return builder.module()


def scheduled(module: Module) -> Module:
    return obey(module, schedule_ops(module, LIKELY), LIKELY)


def with_tiles(module: Module) -> Module:
    """Return the module with half of each expert's groups of columns dead, stored as tiles."""

    def tiled(weight: Weight) -> Weight:
        if not weight.section.startswith("expert."):
            return weight
        array = weight.array.copy()
        array[:, : array.shape[1] // 64 * 32 + 16] = 0
        return Weight(weight.id, weight.kind, array, weight.section, TILES)

    weights = tuple(tiled(weight) for weight in module.weights)
    return Module(module.programs, module.buffers, weights, module.kv, module.max_tokens)


def conversation(seed: int = 0) -> Iterator[dict[str, bytes]]:
    draw, at = np.random.default_rng(seed), 0
    for tokens in RUNS:
        yield {
            "token_ids": ids(draw.integers(0, 50, tokens)).tobytes(),
            "positions": ids(range(at, at + tokens)).tobytes(),
        }
        at += tokens


def talk(plan: NativePlan, values: Iterable[dict[str, bytes]]) -> list[dict[str, bytes]]:
    """Run steps; return what each gave."""
    return [raw(plan.run("step", one)) for one in values]


MODULES = {"plain": decoder, "scheduled": lambda: scheduled(decoder())}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", MODULES)
def test_the_bits_are_those_of_a_plan_that_has_all(kind: str, share: float) -> None:
    case = Case.of(MODULES[kind]())
    for target, threads in ((PORTABLE, 3), (native_targets()[-2], 1)):
        with case.native(target) as plain, pooled(case, target, share) as (plan, weights):
            plan.threads = threads
            slots = [weights.pool.slot(number) for number in range(24)]
            for values in conversation():
                assert raw(plan.run("step", values)) == raw(plain.run("step", values))
                counts = weights.pool.counts()
                assert counts["committed_bytes"] <= weights.layout.runs * RUN
                assert counts["asked_bytes"] <= counts["given_bytes"] <= counts["committed_bytes"]
            assert counts["steps"] == len(RUNS)
            assert counts["chosen"] == counts["hits"] + counts["late"] + counts["misses"]
            assert counts["misses"] + counts["ahead"] > 0
            assert slots == [weights.pool.slot(number) for number in range(24)]


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_fused_layer_and_pruned_experts_come_as_they_are_needed(reads_ahead: bool) -> None:
    """Tiles are checked when a context is built: each expert is fetched for it, in any budget."""
    x = np.random.default_rng(2).standard_normal((4, 24)).astype(np.float32).tobytes()
    fused = Case.of(scheduled_fused())
    with fused.native(PORTABLE) as plain:
        expected = raw(plain.run("run", {"x": x}))
    with pooled(fused, PORTABLE, 0.1, reads_ahead=reads_ahead) as (plan, _):
        assert raw(plan.run("run", {"x": x})) == expected
    tiles = Case.of(with_tiles(decoder()))
    with (
        tiles.native(PORTABLE) as plain,
        pooled(tiles, PORTABLE, 0.3, reads_ahead=reads_ahead) as (plan, weights),
    ):
        for values in conversation(1):
            assert raw(plan.run("step", values)) == raw(plain.run("step", values))
        assert (weights.pool.counts()["ahead"] > 0) is reads_ahead


def scheduled_fused() -> Module:
    module = moe(NormKind.RMS, 0, residual=True, fused=True)
    return obey(module, schedule_ops(module))


def test_who_looks_sees_which_experts_are_there() -> None:
    case = Case.of(decoder())
    with pooled(case, PORTABLE, 0.5, reads_ahead=False) as (plan, weights):
        for values in conversation():
            plan.run("step", values)
            states = dict(zip(weights.layout.experts, weights.pool.states(), strict=True))
            by_name = {expert.name: state for expert, state in states.items()}
            assert ExpertState.ABSENT in by_name.values()
            for number, weight in enumerate(plan.plan.weights):
                state = by_name.get(plan.plan.sections[weight.section].name)
                assert plan.is_resident(number) is (state in (None, ExpertState.PRESENT))
    with case.native(PORTABLE) as plain:
        assert plain.is_resident(0)
        with pytest.raises(NativeError):
            plain.is_resident(100_000)


def test_two_plans_share_one_pool_and_run_side_by_side() -> None:
    case = Case.of(decoder())
    with case.native(PORTABLE) as plain:
        expected = {0: talk(plain, conversation(0))}
        plain.kv_length = 0
        expected[1] = talk(plain, conversation(1))
    found: dict[int, list[dict[str, bytes]]] = {}

    def one_side(plan: NativePlan, seed: int) -> None:
        found[seed] = talk(plan, conversation(seed))

    with (
        pooled(case, PORTABLE, 0.25) as (first, weights),
        NativePlan(library(PORTABLE), case.emitted.plan_bytes, weights) as second,
    ):
        threads = [
            threading.Thread(target=one_side, args=item) for item in ((first, 0), (second, 1))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected
        second.close()
        first.kv_length = 0
        assert talk(first, conversation(1)) == expected[1]
        assert weights.pool.counts()["committed_bytes"] <= weights.layout.runs * RUN


def test_a_file_that_changes_is_refused_and_may_come_back() -> None:
    case = Case.of(decoder())
    with (
        case.native(PORTABLE) as plain,
        pooled(case, PORTABLE, 0.25, reads_ahead=False) as (plan, weights),
    ):
        good = {}
        for file, state in zip(weights.pool.files, weights.pool.states(), strict=True):
            if state is ExpertState.ABSENT:
                good[file.fd] = os.pread(file.fd, 1, 17)
                os.pwrite(file.fd, bytes([good[file.fd][0] ^ 1]), 17)
        values = list(conversation())
        with pytest.raises(ExpertAbsentError):
            talk(plan, values)
        assert weights.pool.counts()["corrupt"] == 1
        assert ExpertState.FAILED in weights.pool.states()
        for fd, byte in good.items():
            os.pwrite(fd, byte, 17)
        plan.kv_length = plain.kv_length = 0
        for one in values:
            assert raw(plan.run("step", one)) == raw(plain.run("step", one))


def test_an_expert_that_changes_in_memory_is_found_and_read_anew() -> None:
    pool = small_pool(2, 2, 4)
    assert all(pool.check(number) for number in range(4))
    pool.view(2)[RUN - 1] ^= 0x10
    assert pool.touch(2)
    assert pool.check(2)  # in use: left alone
    pool.settle()
    assert not pool.check(2)
    assert pool.states()[2] is ExpertState.FAILED
    assert pool.counts()["corrupt"] == 1
    assert pool.touch(2)
    pool.settle()
    assert pool.check(2)
    with pytest.raises(NativeError):
        pool.check(4)


def test_experts_in_memory_are_looked_at_in_turn() -> None:
    with pooled(Case.of(decoder()), PORTABLE, 0.5, reads_ahead=False) as (_, weights):
        pool = weights.pool
        here = [number for number, s in enumerate(pool.states()) if s is ExpertState.PRESENT]
        names = [weights.layout.experts[number].name for number in here]
        pool.view(here[3])[17] ^= 4
        pool.view(here[5])[-1] ^= 128
        assert weights.check_experts(1) == {names[0]: True}
        found = weights.check_experts(1 << 40)
        assert [name for name, is_whole in found.items() if not is_whole] == [names[3], names[5]]
        assert sorted(found) == sorted(names)
        left = weights.check_experts(1 << 40)
        assert sorted(left) == sorted(set(names) - {names[3], names[5]})
        assert all(left.values())


def test_a_truncated_file_is_a_load_cut_short() -> None:
    with pooled(Case.of(decoder()), PORTABLE, 0.25, reads_ahead=False) as (plan, weights):
        for file in weights.pool.files:
            os.ftruncate(file.fd, 100)
        with pytest.raises(ExpertAbsentError):
            talk(plan, conversation())
        assert weights.pool.counts()["failed"] == 1


def test_what_was_not_signed_never_gets_in() -> None:
    data = b"x" * 5000
    files = [ExpertFile(memory_file(data), len(data), "0" * 64, 0)]
    pool = ExpertPool(KernelLibrary(library(PORTABLE)), files, run_bytes=RUN, runs=2)
    with pytest.raises(ExpertDamagedError, match="signed") as caught:
        pool.fill()
    assert caught.value.number == 0
    assert pool.states() == [ExpertState.FAILED]
    assert not pool.touch(0)
    assert pool.counts()["committed_bytes"] == 2 * RUN
    os.close(files[0].fd)


def test_a_reader_that_hangs_is_overtaken() -> None:
    """The lent thread sleeps before each load; whoever waits for it loads by itself after 2 ms."""
    case = Case.of(scheduled(decoder()))
    with case.native(PORTABLE) as plain, pooled(case, PORTABLE, 0.5) as (plan, weights):
        weights.pool.set(PoolKnob.DELAY_US, 30_000)
        for values in conversation():
            assert raw(plan.run("step", values)) == raw(plain.run("step", values))
        assert weights.pool.counts()["timeouts"] > 0


def test_under_pressure_only_what_a_row_chose_is_loaded() -> None:
    case = Case.of(scheduled(decoder()))
    with case.native(PORTABLE) as plain, pooled(case, PORTABLE, 0.4) as (plan, weights):
        pool = weights.pool
        pool.set(PoolKnob.PRESSURE, 700)
        for values in conversation():
            assert raw(plan.run("step", values)) == raw(plain.run("step", values))
        refused = pool.counts()["refused"]
        assert refused > 0
        before = pool.counts()["committed_bytes"]
        pool.set(PoolKnob.PRESSURE, 900)
        plan.kv_length = plain.kv_length = 0
        one = next(conversation(5))
        assert raw(plan.run("step", one)) == raw(plain.run("step", one))
        assert pool.counts()["returned"] > 0
        pool.set(PoolKnob.STRICT, 1)
        for number in range(24):
            pool.set(PoolKnob.RUNS, weights.layout.least_runs)
            assert pool.touch(number) in (True, False)
        pool.settle()
        assert pool.counts()["committed_bytes"] <= min(before, weights.layout.least_runs * RUN)
        with pytest.raises(ExpertAbsentError):
            talk(plan, conversation(6))


def replay(pool: ExpertPool, passes: int, after: Sequence[Sequence[int]], width: int) -> None:
    """Walk layers where each expert is followed by one other; begin with another one each pass."""
    for step in range(passes):
        pool.begin_pass()
        chosen = step * 3 % width
        for layer, row in enumerate([*after, ()]):
            pool.choose([layer * width + chosen])
            assert pool.touch(layer * width + chosen)
            pool.settle()
            chosen = row[chosen] if row else chosen


def small_pool(layers: int, width: int, runs: int, groups: Sequence[int] = ()) -> ExpertPool:
    kept = [memory_file(os.urandom(RUN)) for _ in range(layers * width)]
    files = [
        ExpertFile(fd, RUN, "", at // width, groups[at] if groups else NO_GROUP)
        for at, fd in enumerate(kept)
    ]
    pool = ExpertPool(KernelLibrary(library(PORTABLE)), files, run_bytes=RUN, runs=runs)
    weakref.finalize(pool, lambda: [os.close(fd) for fd in kept])
    pool.fill()
    return pool


AFTER: Final = (
    [(5 * e + 3) % 8 for e in range(8)],
    [(3 * e + 1) % 8 for e in range(8)],
    [7 - e for e in range(8)],
)
"""Which of eight experts of the next layer follows each one."""


def test_what_follows_is_learned_and_foreseen() -> None:
    """After a few passes every expert of the next layer is named before it is chosen."""
    pool = small_pool(4, 8, 16)
    replay(pool, 60, AFTER, 8)
    before = pool.counts()
    replay(pool, 24, AFTER, 8)
    counts = pool.counts()
    assert counts["predicted"] - before["predicted"] == 4 * 24
    assert counts["chosen"] - before["chosen"] == 4 * 24
    assert counts["foreseen"] - before["foreseen"] >= 3 * 24


def test_an_expert_that_is_foreseen_is_read_ahead() -> None:
    pool = small_pool(4, 8, 16)
    replay(pool, 60, AFTER, 8)
    reader = ReadAhead(pool)
    for _ in range(200):
        replay(pool, 8, AFTER, 8)
        if pool.counts()["hidden"] > 0:
            break
    reader.close()
    counts = pool.counts()
    assert counts["hidden"] > 0
    assert counts["committed_bytes"] <= 16 * RUN


@pytest.mark.parametrize(("pressure", "comes"), [(0, True), (700, False)])
def test_groups_come_together_unless_memory_is_short(pressure: int, comes: bool) -> None:
    """Two groups over three layers; one expert of a group is missed in the first layer."""
    groups = [0, 1] * 3
    pool = small_pool(3, 2, 6, groups)
    pool.set(PoolKnob.RUNS, 1)
    pool.set(PoolKnob.RUNS, 6)
    missing = next(at for at, s in enumerate(pool.states()) if s is ExpertState.ABSENT and at < 2)
    mates = [at for at in range(2, 6) if groups[at] == groups[missing]]
    absent = [at for at in mates if pool.states()[at] is ExpertState.ABSENT]
    assert absent
    reader = ReadAhead(pool)
    while not pool.is_read_ahead:
        time.sleep(0.001)
    pool.set(PoolKnob.PRESSURE, pressure)
    pool.begin_pass()
    pool.choose([missing])
    assert pool.touch(missing)
    deadline = time.monotonic() + (10 if comes else 0.2)
    while time.monotonic() < deadline:
        states = pool.states()
        if all(states[at] is ExpertState.PRESENT for at in absent):
            break
        time.sleep(0.005)
    reader.close()
    found = [pool.states()[at] is ExpertState.PRESENT for at in absent]
    assert all(found) if comes else not any(found)


def test_a_reader_a_run_and_a_host_at_once_harm_no_byte() -> None:
    """Budget, pressure and delays change while experts come and go; what is used is whole."""
    draw = random.Random(4)
    data = [draw.randbytes(draw.randint(1, 5 * RUN)) for _ in range(48)]
    fds = [memory_file(one) for one in data]
    files = [
        ExpertFile(fd, len(one), "", at // 8, at % 5)
        for at, (fd, one) in enumerate(zip(fds, data, strict=True))
    ]
    pool = ExpertPool(KernelLibrary(library(PORTABLE)), files, run_bytes=RUN, runs=40)
    pool.fill()
    reader, ended = ReadAhead(pool), threading.Event()

    def turn_knobs() -> None:
        turn = random.Random(9)
        while not ended.wait(0.001):
            pool.set(PoolKnob.RUNS, turn.randint(12, 120))
            pool.set(PoolKnob.PRESSURE, turn.choice((0, 0, 700, 950)))
            pool.set(PoolKnob.DELAY_US, turn.choice((0, 0, 0, 100, 3000)))

    host = threading.Thread(target=turn_knobs)
    host.start()
    try:
        for _ in range(2000):
            pool.begin_pass()
            for layer in range(6):
                chosen = [8 * layer + number for number in draw.sample(range(8), 2)]
                pool.choose(chosen)
                for number in chosen:
                    assert pool.touch(number)
                    assert pool.view(number) == data[number]
                pool.settle()
    finally:
        ended.set()
        host.join()
        reader.close()
    counts = pool.counts()
    assert counts["hits"] + counts["late"] + counts["misses"] == counts["chosen"] == 24_000
    assert counts["moved"] > 1000
    assert counts["ahead"] > 100
    assert counts["failed"] == counts["corrupt"] == 0
    for fd in fds:
        os.close(fd)


def test_experts_of_several_layers_at_once_teach_nothing() -> None:
    pool = small_pool(3, 4, 6)
    draw = random.Random(3)
    for _ in range(300):
        pool.begin_pass()
        pool.choose(draw.sample(range(12), draw.randint(1, 12)))
    with pytest.raises(NativeError):
        pool.choose([12])
    assert pool.touch(11)


def test_memory_is_taken_as_it_is_needed_and_given_back() -> None:
    size = 40 * RUN + 1
    files = [ExpertFile(memory_file(os.urandom(size)), size, "", layer) for layer in range(3)]
    pool = ExpertPool(
        KernelLibrary(library(PORTABLE)),
        files,
        run_bytes=RUN,
        runs=82,
        persistent_bytes=1 << 40,  # only address space
    )
    assert pool.counts()["committed_bytes"] == 0
    pool.fill()
    assert pool.counts()["committed_bytes"] == 82 * RUN
    assert [state.name for state in pool.states()] == ["PRESENT", "PRESENT", "ABSENT"]
    moved = pool.counts()["moved"]
    assert pool.touch(2)
    assert pool.counts()["moved"] == moved + 41
    pool.settle()
    pool.set(PoolKnob.RUNS, 41)
    assert pool.counts()["committed_bytes"] == 41 * RUN
    assert pool.touch(0)
    pool.settle()
    pool.set(PoolKnob.RUNS, 40)
    assert pool.counts()["committed_bytes"] == 40 * RUN
    assert not pool.touch(1)
    for file in files:
        os.close(file.fd)


@pytest.mark.parametrize(
    ("run_bytes", "length", "layers"),
    [(1000, 10, (0,)), (2048, 10, (0,)), (RUN, 0, (0,)), (RUN, 10, (1,)), (RUN, 10, (0, 2))],
)
def test_a_pool_that_is_none_is_refused(
    run_bytes: int, length: int, layers: tuple[int, ...]
) -> None:
    files = [ExpertFile(0, length, "", layer) for layer in layers]
    with pytest.raises(NativeError, match="cannot open a pool"):
        ExpertPool(KernelLibrary(library(PORTABLE)), files, run_bytes=run_bytes, runs=4)


def test_a_dump_is_looked_at_before_it_is_believed() -> None:
    files = [ExpertFile(memory_file(bytes(3 * RUN)), 3 * RUN, "", at) for at in range(3)]
    pool = ExpertPool(KernelLibrary(library(PORTABLE)), files, run_bytes=RUN, runs=7)
    pool.fill()
    dump = pool.dump()
    draw = np.random.default_rng(1)
    refused = 0
    for _ in range(400):
        bad = bytearray(dump)
        at = int(draw.integers(len(dump) // 4)) * 4
        bad[at : at + 4] = int(draw.choice([0, 1, 2, 3, 9, 1 << 31, 0xFFFFFFFF])).to_bytes(
            4, "little"
        )
        try:
            pool.restore(bytes(bad))
        except NativeError:
            refused += 1
            assert pool.dump()
        else:
            pool.restore(dump)
    assert refused > 100
    for cut in (0, 4, len(dump) - 4, len(dump) + 4):
        with pytest.raises(NativeError):
            pool.restore((dump + bytes(4))[:cut])
    assert pool.dump() == dump
    pool.touch(0)
    with pytest.raises(NativeError, match="busy"):
        pool.dump()
    pool.settle()
    for file in files:
        os.close(file.fd)


def test_random_sequences_do_what_the_model_does() -> None:
    assert compared_in("tests.factories.pool_fuzz", 0, 40) == 40 * 300


def test_random_sequences_keep_within_their_memory() -> None:
    assert compared_in("tests.factories.pool_fuzz", 100, 110, "sanitised") == 10 * 300


def test_weights_without_a_section_are_refused() -> None:
    case = Case.of(decoder())
    with pooled(case, PORTABLE, 0.5) as (_, weights):
        layout = weights.layout
        files = weights.pool.files
        with pytest.raises(NativeError, match="missing"):
            PooledWeights(KernelLibrary(library(PORTABLE)), layout, {}, files)
