"""Plan bytes from an enemy: a typed error, or a plan that runs inside its own memory."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.errors import ContractError
from compiler.contract.operations import Op
from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import (
    BUFFER,
    CALL,
    HEADER,
    MAX_PLAN_BYTES,
    PORT,
    PROGRAM,
    SECTION,
    WEIGHT,
    Kind,
    Record,
)
from tests.factories.hostile_plans import FEATURES
from tests.factories.kernels import Case
from tests.factories.modules import small_decoder

MUTANTS = 300
TABLES = (SECTION, WEIGHT, BUFFER, PROGRAM, PORT, CALL)


@pytest.fixture(scope="module")
def good() -> bytes:
    return Case.of(small_decoder()).emitted.plan_bytes


def header(data: bytes) -> dict[str, int]:
    names = [field.name for field in HEADER.fields]
    return dict(zip(names, HEADER.layout.unpack_from(data), strict=True))


def place(data: bytes, record: Record, row: int, field: str) -> tuple[int, str]:
    """Return offset and struct code of a field."""
    counts = header(data)
    at = HEADER.layout.size
    for table in TABLES:
        if table is record:
            break
        at += table.layout.size * counts[PLURALS[table.name]]
    at += record.layout.size * row
    for one in record.fields:
        if one.name == field:
            return at, f"<{one.code}"
        at += struct.calcsize(f"<{one.count}{one.code}")
    raise KeyError(field)


PLURALS = {
    "sf_section_record": "sections",
    "sf_weight_record": "weights",
    "sf_buffer_record": "buffers",
    "sf_program_record": "programs",
    "sf_port_record": "ports",
    "sf_call_record": "calls",
}


def poke(data: bytes, record: Record, row: int, field: str, value: int) -> bytes:
    at, code = place(data, record, row, field)
    changed = bytearray(data)
    struct.pack_into(code, changed, at, value)
    return bytes(changed)


def peek(data: bytes, record: Record, row: int, field: str) -> int:
    at, code = place(data, record, row, field)
    return int(struct.unpack_from(code, data, at)[0])


def poke_header(data: bytes, field: str, value: int | bytes) -> bytes:
    values: dict[str, int | bytes] = dict(header(data))
    values[field] = value
    return HEADER.layout.pack(*values.values()) + data[HEADER.layout.size :]


def test_it_reads_the_untouched_plan(good: bytes) -> None:
    plan = parse_plan(good)
    assert [program.name for program in plan.programs] == ["see", "step"]
    assert Op.EXPERTS in plan.ops
    assert plan.arena_bytes < sum(buffer.length for buffer in plan.buffers) / 3


def test_it_refuses_every_truncation(good: bytes) -> None:
    for length in {*range(0, 200, 7), *range(200, len(good), 211), len(good) - 1}:
        with pytest.raises(PlanError):
            parse_plan(good[:length])


def test_it_refuses_more_bytes(good: bytes) -> None:
    for more in (b"\0", good):
        with pytest.raises(PlanError):
            parse_plan(good + more)
    with pytest.raises(PlanError):
        parse_plan(bytes(MAX_PLAN_BYTES + 1))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("magic", b"SFPLAN99", "not a plan"),
        ("abi", 2, "ABI"),
        ("header_bytes", 96, "damaged"),
        ("reserved", 1, "damaged"),
        ("total_bytes", 0, "tables need"),
        ("weights", 0xFFFFFFFF, "at most"),
        ("calls", 3, "tables need"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 1 << 20, "max_tokens"),
        ("kv_layers", 0, "cache"),
        ("kv_capacity", (1 << 20) + 1, "out of range"),
        ("kv_layers", 1 << 20, "too large"),
        ("kv_heads", 1, "heads differ"),
        ("arena_bytes", 64, "beyond the arena"),
        ("arena_bytes", 1 << 40, "too large"),
    ],
)
def test_it_refuses_a_bad_header(good: bytes, field: str, value: int | bytes, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_plan(poke_header(good, field, value))


@pytest.mark.parametrize(
    ("record", "field", "value", "message"),
    [
        (SECTION, "bytes", 0, "out of range"),
        (SECTION, "bytes", 64, "its section"),
        (WEIGHT, "kind", max(Kind) + 1, "unknown"),
        (WEIGHT, "section", 4000, "lies in section"),
        (WEIGHT, "rows", 0, "a weight of"),
        (WEIGHT, "cols", 1 << 21, "a weight of"),
        (WEIGHT, "offset", 1 << 40, "its section"),
        (WEIGHT, "offset", 3, "multiple"),
        (WEIGHT, "bytes", 4, "takes"),
        (BUFFER, "dtype", 7, "unknown type"),
        (BUFFER, "dynamic", 2, "unknown type"),
        (BUFFER, "rows", 0, "a buffer of"),
        (BUFFER, "offset", 1 << 40, "beyond"),
        (BUFFER, "offset", 5, "multiple"),
        (BUFFER, "bytes", 1 << 30, "takes"),
        (PROGRAM, "calls", 1 << 20, "ends beyond"),
        (PROGRAM, "first_call", 1, "follow"),
        (PORT, "buffer", 1 << 20, "names buffer"),
        (PORT, "direction", 5, "direction"),
        (CALL, "op", 0, "unknown"),
        (CALL, "op", 999, "unknown"),
        (CALL, "first_operand", 1, "follow"),
        (CALL, "inputs", 60000, "beyond"),
        (CALL, "reserved", 1, "follow"),
    ],
)
def test_it_refuses_a_bad_record(
    good: bytes, record: Record, field: str, value: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        parse_plan(poke(good, record, 0, field, value))


def test_it_refuses_live_buffers_that_overlap(good: bytes) -> None:
    """Put the result of the first linear call of `step` onto its operand."""
    plan = parse_plan(good)
    call = next(c for c in plan.programs[1].calls if c.op is Op.LINEAR)
    source = plan.buffers[call.inputs[0]].offset
    assert plan.buffers[call.outputs[0]].offset != source
    with pytest.raises(PlanError, match="overlaps"):
        parse_plan(poke(good, BUFFER, call.outputs[0], "offset", source))


def test_it_refuses_reading_what_was_not_written(good: bytes) -> None:
    plan = parse_plan(good)
    calls = [call for program in plan.programs for call in program.calls]
    number = next(at for at, call in enumerate(calls) if call.op is Op.LINEAR)
    first = peek(good, CALL, number, "first_operand")
    changed = bytearray(good)
    at = len(good) - 4 * header(good)["operands"] + 4 * first
    struct.pack_into("<i", changed, at, calls[number + 1].outputs[0])
    with pytest.raises(PlanError, match="before written"):
        parse_plan(bytes(changed))


def test_it_refuses_operands_out_of_range(good: bytes) -> None:
    start = len(good) - 4 * header(good)["operands"]
    for value in (-2, 1 << 20, -(1 << 31)):
        for operand in range(0, 40, 3):
            changed = bytearray(good)
            struct.pack_into("<i", changed, start + 4 * operand, value)
            with pytest.raises(PlanError):
                parse_plan(bytes(changed))


def test_it_refuses_parameters_out_of_range(good: bytes) -> None:
    plan = parse_plan(good)
    calls = [call for program in plan.programs for call in program.calls]
    wrong: dict[Op, tuple[int, ...]] = {
        Op.ATTENTION: (0, 0x7FC00000, 2, 99, 7),
        Op.CONV2D: (0, 4097, 0, 128, 3, 1, 1, 4097),
        Op.PRUNE: (10**6, 10**6),
        Op.ROUTE: (3, 9),
        Op.ROWS_SLICE: (10**6, 10**6),
    }
    for op, values in wrong.items():
        number = next(at for at, call in enumerate(calls) if call.op is op)
        for slot, value in enumerate(values):
            at, _ = place(good, CALL, number, "params")
            changed = bytearray(good)
            struct.pack_into("<I", changed, at + 4 * slot, value)
            with pytest.raises(PlanError):
                parse_plan(bytes(changed))


ODD_NUMBERS = (0, 1, 2, 63, 65, 9544, 1 << 20, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutate(data: bytearray, random: np.random.Generator) -> None:
    """Flip a bit, or write an odd number, a small number or another operand."""
    kind = int(random.integers(4))
    if kind == 0:
        at = int(random.integers(len(data)))
        data[at] ^= 1 << int(random.integers(8))
    elif kind == 1:
        value = ODD_NUMBERS[int(random.integers(len(ODD_NUMBERS)))]
        struct.pack_into("<I", data, 4 * int(random.integers(len(data) // 4)), value)
    elif kind == 2:
        at = 2 * int(random.integers(len(data) // 2))
        struct.pack_into("<H", data, at, int(random.integers(40)))
    else:
        at = len(data) - 4 * int(random.integers(1, 300))
        struct.pack_into("<i", data, at, int(random.integers(-1, 80)))


def mutants(good: bytes) -> list[bytes]:
    """Return plans with one to three changes each, the same ones every time."""
    random = np.random.default_rng(20240601)
    found = []
    for _ in range(MUTANTS):
        changed = bytearray(good)
        for _ in range(int(random.integers(1, 4))):
            mutate(changed, random)
        found.append(bytes(changed))
    return found


def test_it_lets_only_typed_errors_out(good: bytes) -> None:
    refused = 0
    for mutant in mutants(good):
        try:
            parse_plan(mutant)
        except ContractError:
            refused += 1
    assert refused > MUTANTS // 2


RUN_SURVIVORS = """
import numpy as np
from compiler.contract.errors import ContractError
from tests.contract.test_plan_hostile import mutants
from tests.factories.kernels import Case, library
from tests.factories.modules import small_decoder
from compiler.contract.native import NativePlan

case = Case.of(small_decoder())
image = np.arange(256, dtype=np.uint8)
ids = np.arange(5, dtype=np.int32)
ran = 0
for mutant in mutants(case.emitted.plan_bytes):
    try:
        with NativePlan(library("x86-64-v1"), mutant, case.emitted.sections) as plan:
            plan.run("see", {"image": image})
            plan.run("step", {"token_ids": ids, "positions": ids + 6})
            ran += 1
    except ContractError:
        pass
print("ran", ran)
"""


def test_it_runs_the_surviving_mutants_without_a_crash() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", RUN_SURVIVORS],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 1


FEATURE_MUTANTS = 120


def test_no_damage_to_plans_and_weights_of_newer_features_crashes() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.factories.hostile_plans", str(FEATURE_MUTANTS)],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(FEATURES)
    for line in lines:
        refused, ran, _ = (int(part.split()[0]) for part in line.partition(": ")[2].split(", "))
        assert 0 < refused < FEATURE_MUTANTS, line
        assert ran > 0, line
