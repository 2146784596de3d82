"""MoE and QMoE: layouts, activations, and where ONNX Runtime goes its own way."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compiler.analysis import moe_meaning
from compiler.errors import UnsupportedOperatorError
from compiler.frontend.onnx_ops import OPERATORS, REQUIRED
from compiler.kernels.program import ExpertAct, Module, RouteOrder
from compiler.passes.contrib_weights import dequantised, unpacked
from compiler.passes.pipeline import LoweredPipeline
from compiler.simulator import Simulator
from tests.factories.moe_contrib import ACTS, Contrib, contrib, packed_codes
from tests.factories.moe_shapes import Mix, Weights, trained
from tests.factories.onnx_models import write_block
from tests.factories.onnx_runs import Array, block_rows, lowered, module_difference

SIZES: dict[str, Any] = {"width": 32, "hidden": 32}
BITS = (2, 4, 8)


PLAIN = Contrib()


def written(folder: Path, mix: Mix, how: Contrib = PLAIN) -> Path:
    return write_block(folder, contrib(mix, how), width=mix.width)


def calls(pipeline: LoweredPipeline) -> tuple[str, str]:
    route, experts = pipeline.module.programs[0].calls
    order = RouteOrder(int(route.params["order"])).name.lower()
    return order, ExpertAct(int(experts.params["act"])).name.lower()


def simulated(module: Module, x: Array) -> Array:
    return Simulator(module, mode="f64").run_arrays("forward", {"tensor": x})["tensor"]


@pytest.mark.parametrize("act", ACTS)
def test_it_reads_every_activation(tmp_path: Path, act: str) -> None:
    directory = written(tmp_path, Mix(act=act, biases=True, **SIZES))
    pipeline = lowered(directory)
    assert calls(pipeline) == ("softmax_topk_renorm", act)
    assert module_difference(directory, pipeline.module, 9) < 1e-5


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("zeros", [False, True])
def test_it_reads_quantised_weights(tmp_path: Path, bits: int, block: int, zeros: bool) -> None:
    directory = written(tmp_path, Mix(**SIZES), Contrib(bits=bits, block=block, zeros=zeros))
    pipeline = lowered(directory)
    assert any("judged by ONNX Runtime" in note for note in pipeline.notes)
    coarse = block and bits == 8  # this CPU kernel multiplies with int8 activations
    assert module_difference(directory, pipeline.module, 9) < (2e-2 if coarse else 1e-5)


@pytest.mark.parametrize("fusion", [0, 2])
@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("act", ["swiglu", "swiglu_clipped"])
def test_it_reads_what_no_cpu_kernel_runs(tmp_path: Path, fusion: int, bits: int, act: str) -> None:
    """Separate and concatenated gate rows: the same mixture as the interleaved one."""
    mix = Mix(act=act, biases=True, **SIZES)
    known = lowered(written(tmp_path / "known", mix, Contrib(bits=bits)))
    other = lowered(written(tmp_path / "other", mix, Contrib(bits=bits, fusion=fusion)))
    x = block_rows(tmp_path / "known", 9)
    assert np.allclose(simulated(known.module, x), simulated(other.module, x), atol=1e-9)


def test_it_keeps_the_normalisation_of_onnx_runtime(tmp_path: Path) -> None:
    directory = written(tmp_path, Mix(**SIZES), Contrib(bits=4, normalize=0))
    pipeline = lowered(directory)
    assert calls(pipeline)[0] == "softmax_topk_renorm"
    assert any("as ONNX Runtime does for every QMoE" in note for note in pipeline.notes)
    assert module_difference(directory, pipeline.module, 9) < 1e-5


@pytest.mark.parametrize("normalize", [0, 1])
def test_it_mixes_by_operand_fourteen(tmp_path: Path, normalize: int) -> None:
    mix = Mix(router="sigmoid_topk", **SIZES)
    directory = written(tmp_path, mix, Contrib(bits=4, normalize=normalize))
    pipeline = lowered(directory)
    assert calls(pipeline)[0] == ("sigmoid_topk_renorm" if normalize else "sigmoid_topk")
    assert module_difference(directory, pipeline.module, 9) < 1e-5


def test_it_reads_a_sparse_mixer_by_definition(tmp_path: Path) -> None:
    mix = Mix(router="sparsemixer", act="relu", **SIZES)
    directory = written(tmp_path, mix)
    pipeline = lowered(directory)
    random = np.random.default_rng(0)
    weight = trained(random, 1, mix.experts, mix.width)[0] * 3
    w = Weights.of(mix, random)
    router = moe_meaning.Router(weight, None, mix.k, "sparsemixer", {"jitter": 0.02})
    x = block_rows(directory, 9)
    index, gate, _ = moe_meaning.route(router, x)
    experts = moe_meaning.Experts(w.w_in, w.w_out, None, None, "relu")
    wanted = moe_meaning.mix(experts, x, index, gate)
    assert np.abs(simulated(pipeline.module, x) - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert any("no CPU kernel runs it" in note for note in pipeline.notes)


@pytest.mark.parametrize(
    "change",
    [{"quant_type": "fp4"}, {"expert_weight_bits": 3}, {"weights_prepacked": 1}, {"k": 7}],
)
def test_it_leaves_what_it_cannot_read(tmp_path: Path, change: dict[str, Any]) -> None:
    directory = written(tmp_path, Mix(**SIZES), Contrib(bits=4))
    model = onnx.load(directory / "model.onnx")
    node = next(n for n in model.graph.node if n.op_type == "QMoE")
    kept = [a for a in node.attribute if a.name not in change]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in change.items())
    onnx.save(model, directory / "model.onnx")
    with pytest.raises(UnsupportedOperatorError, match="QMoE"):
        lowered(directory)


@pytest.mark.parametrize("bits", BITS)
def test_it_unpacks_low_bits_first(bits: int) -> None:
    codes = np.arange(24).reshape(2, 12) % 2**bits
    assert np.array_equal(unpacked(packed_codes(codes, bits), bits)[:, :12], codes)


def test_it_dequantises_by_hand() -> None:
    weight = packed_codes(np.asarray([[[0, 15, 8, 9]]]), 4)
    scales = np.asarray([[[2.0, 0.5]]], np.float32)
    found = dequantised(weight, scales, None, 4)
    assert found.tolist() == [[[-16.0, 14.0, 0.0, 0.5]]]
    zeros = packed_codes(np.asarray([[[1, 9]]]), 4)
    assert dequantised(weight, scales, zeros, 4).tolist() == [[[-2.0, 28.0, -0.5, 0.0]]]


@pytest.mark.parametrize("kind", ["MoE", "QMoE", "MoEGroupRouter"])
def test_it_knows_the_attributes_of_the_installed_runtime(kind: str) -> None:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    schema = next(
        s for s in state.get_all_operator_schema() if (s.domain, s.name) == ("com.microsoft", kind)
    )
    row = OPERATORS[f"com.microsoft::{kind}"]
    assert set(row.attrs) == set(schema.attributes)
    required = {name for name, attribute in schema.attributes.items() if attribute.required}
    assert required == {name for name, value in row.attrs.items() if value is REQUIRED}
