"""The recorder of calibration runs: inputs, zeros, routes; bounded, and the same twice."""

import io
import zipfile

import numpy as np
import pytest

from compiler.contract.session import step_inputs
from compiler.kernels.program import Module, Op
from compiler.quant import record
from compiler.quant.record import CalibrationRecord, Recorder
from compiler.quant.w4 import QuantError
from compiler.simulator import Simulator
from tests.factories.modules import small_decoder

PICTURE = np.random.default_rng(5).integers(0, 256, 256, np.uint8).tobytes()


def run(module: Module, steps: int = 3) -> CalibrationRecord:
    recorder = Recorder(module)
    simulator = Simulator(module, mode="f64", observer=recorder)
    simulator.run("see", {"image": PICTURE})
    for step in range(steps):
        ids = [(7 * step + at) % 50 for at in range(4)]
        simulator.run("step", step_inputs(ids, 40 + 4 * step))
    return recorder.finish()


def test_it_knows_the_inputs_of_every_w4_weight_that_ran() -> None:
    module = small_decoder()
    found = run(module)
    calls = [call for program in module.programs for call in program.calls]
    shared = {call.weights[0] for call in calls if call.op is Op.LINEAR}
    assert all(found.sample(weight) is not None for weight in shared)
    for weight, number in found.source_of.items():
        assert found.samples[number].rows.shape[1] == module.weights[weight].array.shape[1]


def test_it_shares_a_sample_between_weights_that_read_the_same_buffers() -> None:
    module = small_decoder()
    found = run(module)
    step = next(program for program in module.programs if program.name == "step")
    q, k, v, o = [call.weights[0] for call in step.calls if call.op is Op.LINEAR][:4]
    assert found.source_of[q] == found.source_of[k] == found.source_of[v]
    assert found.source_of[o] != found.source_of[q]


def test_it_keeps_rows_as_the_device_quantises_them() -> None:
    module = small_decoder()
    found = run(module)
    head = next(w.id for w in module.weights if w.array.shape == (50, 48) and w.kind == "w4")
    sample = found.sample(head)
    assert sample is not None
    assert sample.seen == 3
    assert np.abs(sample.rows).max(axis=1).tolist() == [127] * 3
    energy = np.square(sample.values()).mean(axis=0)
    assert np.allclose(energy, sample.energy, rtol=0.1, atol=0.02 * sample.energy.max())


def test_it_counts_zeros_behind_a_relu_and_none_elsewhere() -> None:
    module = small_decoder()
    found = run(module)
    experts = next(c for p in module.programs for c in p.calls if c.op is Op.EXPERTS)
    reached = [w for w in experts.weights[1::2] if found.sample(w) is not None]
    assert reached
    for weight in reached:
        sample = found.sample(weight)
        assert sample is not None
        assert 0.2 < sample.zero_ratio.mean() < 0.8
    head = found.samples[found.source_of[max(found.source_of)]]
    assert head.zero_ratio.max() == 0


def test_it_records_what_routers_saw_and_chose() -> None:
    module = small_decoder()
    found = run(module)
    assert [router.layer for router in found.routers] == [0, 1]
    for router in found.routers:
        assert router.index.shape == (6 + 12, 2)
        assert router.vision.tolist() == [True] * 6 + [False] * 12
        assert router.run.tolist() == [0] * 6 + [1] * 4 + [2] * 4 + [3] * 4
        logits = router.inputs.astype(np.float64) @ module.weights[router.weight].array.T
        best = np.sort(np.argsort(-logits, axis=1)[:, :2], axis=1)
        assert np.array_equal(best, np.sort(router.index, axis=1))


def test_it_stays_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_ROWS", 5)
    monkeypatch.setattr(record, "MAX_ROUTER_ROWS", 40)
    found = run(small_decoder(), steps=12)
    assert all(len(sample.rows) <= 5 for sample in found.samples)
    assert max(sample.seen for sample in found.samples) == 6 + 48
    assert all(20 <= len(router.index) <= 40 for router in found.routers)


@pytest.mark.parametrize("sizes", [(1,) * 23, (4, 1, 9, 2, 7), (23,), (7, 16)])
def test_it_thins_to_every_second_fourth_row_however_rows_arrive(sizes: tuple[int, ...]) -> None:
    kept = record._Thinned(6)
    at = 0
    for size in sizes:
        kept.add(np.arange(at, at + size))
        at += size
    (rows,) = kept.columns()
    assert rows.tolist() == list(range(0, 23, 4))


def test_it_gives_the_same_bytes_twice_and_reads_them_back() -> None:
    first, second = run(small_decoder()).to_bytes(), run(small_decoder()).to_bytes()
    assert first == second
    again = CalibrationRecord.from_bytes(first)
    assert again.to_bytes() == first
    assert again.routers[1].layer == 1


def test_it_refuses_bytes_that_are_no_record() -> None:
    good = run(small_decoder()).to_bytes()
    for bad in (b"", b"no", good[:-40], good[: len(good) // 2]):
        with pytest.raises(QuantError):
            CalibrationRecord.from_bytes(bad)


def npz(**members: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return data.getvalue()


def npy(head: str, version: bytes = b"\x01\x00") -> bytes:
    size = len(head).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + head.encode()


@pytest.mark.parametrize(
    "bad",
    [
        npz(source_of=npy("{'descr': '<i8', 'fortran_order': False, 'shape': (2, 2")),
        npz(source_of=npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1e9, 2), }")),
        npz(source_of=npy("{'descr': '<i8', 'fortran_order': False, 'shape': (2**70, 2), }")),
        npz(source_of=npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({1 << 70},), }}")),
        npz(source_of=npy("{'descr': [1, 2], 'fortran_order': False, 'shape': (2, 2), }")),
        npz(source_of=npy("(" * 300)),
        npz(source_of=b""),
        npz(source_of=b"no array"),
        npz(samples=npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0,), }")),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0,), }"),
        npz(
            source_of=npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0, 2), }"),
            sample=npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0,), }"),
        ),
        npz(
            **{
                "source_of": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0, 2), }"),
                "sample.0.what": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0,), }"),
                "sample.0.seen": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0,), }"),
            }
        ),
    ],
)
def test_it_refuses_archives_that_numpy_stumbles_over(bad: bytes) -> None:
    with pytest.raises(QuantError, match="not a calibration record"):
        CalibrationRecord.from_bytes(bad)
