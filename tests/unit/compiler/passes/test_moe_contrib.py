"""MoE and QMoE: layouts, activations, and where ONNX Runtime goes its own way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compiler.analysis import moe_meaning
from compiler.errors import UnsupportedOperatorError
from compiler.frontend.onnx_ops import OPERATORS, REQUIRED
from compiler.kernels.program import ExpertAct, Module, RouteOrder
from compiler.passes.contrib_weights import dequantised, unpacked
from compiler.passes.pipeline import LoweredPipeline
from compiler.quant.w8 import lies_on_grid
from compiler.simulator import Simulator
from tests.factories.moe_contrib import ACTS, Contrib, contrib, packed_codes
from tests.factories.moe_shapes import Mix, Weights, trained
from tests.factories.onnx_blocks import block_model
from tests.factories.onnx_models import graph_document, write_block, write_submission
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


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("normalize", [0, 1])
def test_it_reads_a_quantised_sparse_mixer_by_definition(
    tmp_path: Path, bits: int, normalize: int
) -> None:
    """Gates are the mixer's own, whatever `normalize_routing_weights` says."""
    mix = Mix(router="sparsemixer", act="relu", **SIZES)
    how = Contrib(bits=bits, block=16, normalize=normalize)
    pipeline = lowered(written(tmp_path / "coded", mix, how))
    assert calls(pipeline)[0] == "sparsemixer"
    assert not any("normalised" in note for note in pipeline.notes)
    plain = lowered(written(tmp_path / "plain", mix))
    route, experts = pipeline.module.programs[0].calls
    known, _ = plain.module.programs[0].calls
    assert route.params == known.params
    routers = [
        module.weights[call.weights[0]].array
        for module, call in ((pipeline.module, route), (plain.module, known))
    ]
    assert np.array_equal(*routers)
    x = block_rows(tmp_path / "plain", 9)
    wanted = simulated(plain.module, x)
    off = np.abs(simulated(pipeline.module, x) - wanted).max() / np.abs(wanted).max()
    assert off < {2: 1.2, 4: 0.3, 8: 0.02}[bits]  # what the codes themselves lose
    assert len(experts.weights) == 2 * mix.experts


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("zeros", [False, True])
def test_it_reads_codes_of_three_bits(tmp_path: Path, block: int, zeros: bool) -> None:
    """The same mixture as its f32 weights; the float kernel of ONNX Runtime judges it."""
    mix = Mix(act="swiglu", width=64, hidden=64)
    directory = written(tmp_path / "coded", mix, Contrib(bits=4, block=block))
    model, arrays = opened(directory)
    random = np.random.default_rng(4)
    matrices = {}
    for name in ("fc1", "fc2"):
        shape = arrays[name].shape[:2]
        codes = random.integers(0, 8, (*shape, 64))
        scales = random.uniform(0.01, 0.05, (*shape, 64 // block)).astype(np.float32)
        matrices[name] = ((codes - 4) * scales.repeat(block, axis=2)).astype(np.float32)
        stored = {name: bitstream(codes), f"{name}_scales": scales}
        if zeros:
            stored[f"{name}_zeros"] = bitstream(np.full((*shape, 64 // block), 4))
        replace_arrays(model, stored)
    set_attributes(model, expert_weight_bits=3, weights_prepacked=0, block_size=block)
    onnx.save(model, directory / "model.onnx")
    plain = written(tmp_path / "plain", mix)
    float_model, _ = opened(plain)
    replace_arrays(float_model, matrices)
    onnx.save(float_model, plain / "model.onnx")
    pipeline = lowered(directory)
    assert any("judged by ONNX Runtime" in note for note in pipeline.notes)
    assert module_difference(plain, pipeline.module, 9) < 1e-5


@pytest.mark.parametrize("block", [0, 24])
def test_it_reads_weights_of_eight_bit_floats(tmp_path: Path, block: int) -> None:
    """float8e4m3fn with a scale per square, the last of them cut, or per expert."""
    mix = Mix(act="swiglu", **SIZES)
    directory = written(tmp_path / "coded", mix, Contrib(bits=8))
    model, arrays = opened(directory)
    random = np.random.default_rng(5)
    matrices: dict[str, Array] = {}
    for name in ("fc1", "fc2"):
        experts, rows, _ = arrays[name].shape
        numbers = random.standard_normal((experts, rows, 32))
        kind = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.FLOAT8E4M3FN)
        weight = numbers.astype(kind)
        if block:
            squares = (experts, -(-rows // block), -(-32 // block))
            scales = random.uniform(0.1, 0.3, squares).astype(np.float32)
            spread = scales.repeat(block, axis=1).repeat(block, axis=2)[:, :rows, :32]
            replace_arrays(model, {name: weight, f"{name}_scales": scales})
        else:
            whole = random.uniform(0.1, 0.3, experts).astype(np.float32)
            spread = whole[:, None, None]
            operands = {name: weight, f"{name}_whole": whole}
            replace_arrays(model, operands, without=[f"{name}_scales"])
        matrices[name] = (weight.astype(np.float32) * spread).astype(np.float32)
    set_attributes(model, quant_type="fp8", expert_weight_bits=8, block_size=block)
    onnx.save(model, directory / "model.onnx")
    plain = written(tmp_path / "plain", mix)
    float_model, _ = opened(plain)
    replace_arrays(float_model, matrices)
    onnx.save(float_model, plain / "model.onnx")
    assert module_difference(plain, lowered(directory).module, 9) < 1e-5


PLACES = {"fc1": 2, "fc1_scales": 3, "fc1_zeros": 11, "fc1_whole": 15}
PLACES |= {"fc2": 5, "fc2_scales": 6, "fc2_zeros": 12, "fc2_whole": 16}
FLOAT_PLACES = {"fc1": 2, "fc2": 4}


def opened(directory: Path) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a model, and the arrays of its mixture's operands by name."""
    model = onnx.load(directory / "model.onnx")
    node, places = mixture(model)
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    names = {name: node.input[at] for name, at in places.items() if at < len(node.input)}
    return model, {name: stored[key] for name, key in names.items() if key in stored}


def mixture(model: onnx.ModelProto) -> tuple[onnx.NodeProto, dict[str, int]]:
    node = next(n for n in model.graph.node if n.op_type in ("MoE", "QMoE"))
    return node, FLOAT_PLACES if node.op_type == "MoE" else PLACES


def replace_arrays(
    model: onnx.ModelProto, arrays: dict[str, Array], without: Sequence[str] = ()
) -> None:
    """Give the mixture other arrays as operands, by name."""
    node, places = mixture(model)
    inputs = [*node.input, *[""] * 21][:21]
    for name in without:
        inputs[places[name]] = ""
    for name, array in arrays.items():
        inputs[places[name]] = f"replaced_{name}"
        model.graph.initializer.append(numpy_helper.from_array(array, f"replaced_{name}"))
    while not inputs[-1]:
        inputs.pop()
    node.input[:] = inputs


def set_attributes(model: onnx.ModelProto, **change: Any) -> None:
    node, _ = mixture(model)
    kept = [a for a in node.attribute if a.name not in change]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in change.items())


def bitstream(codes: Array) -> Array:
    """Pack codes of three bits along the last axis, lowest bits first."""
    bits = (codes[..., None] >> np.arange(3)) & 1
    flat = bits.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return np.packbits(flat, axis=-1, bitorder="little")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant_type": "fp4"}, "which half of a byte"),
        ({"quant_type": "nvfp4"}, "which half of a byte"),
        ({"quant_type": "fp8"}, "without a scale per expert"),
        ({"expert_weight_bits": 3}, "weights_prepacked = 0"),
        ({"expert_weight_bits": 5}, "5 bits, read are 2, 3, 4, 8"),
        ({"weights_prepacked": 1}, "packed for another kernel"),
        ({"k": 7}, "biases or k"),
    ],
)
def test_it_refuses_what_it_cannot_read_and_says_why(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    directory = written(tmp_path, Mix(**SIZES), Contrib(bits=4))
    model = onnx.load(directory / "model.onnx")
    set_attributes(model, **change)
    onnx.save(model, directory / "model.onnx")
    with pytest.raises(UnsupportedOperatorError, match=reason) as caught:
        lowered(directory)
    assert "operator com.microsoft::QMoE (node " in str(caught.value)
    assert "weights_prepacked = 0" in caught.value.hint


def test_it_refuses_a_sparse_mixer_with_gates_of_its_own(tmp_path: Path) -> None:
    mix = Mix(router="sigmoid_topk", act="relu", **SIZES)
    directory = written(tmp_path, mix, Contrib(bits=4))
    model = onnx.load(directory / "model.onnx")
    set_attributes(model, use_sparse_mixer=1)
    onnx.save(model, directory / "model.onnx")
    with pytest.raises(UnsupportedOperatorError, match="a sparse mixer makes its own gates"):
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


@pytest.mark.parametrize(
    ("bits", "quantise", "kind"),
    [
        (8, "none", "w8"),
        (8, "w8", "w8"),
        (8, "w4", "w4"),
        (4, "none", "w4"),
        (32, "none", "w4"),
        (32, "w8", "w8"),
    ],
)
def test_it_stores_experts_in_as_many_bits_as_is_asked(
    tmp_path: Path, bits: int, quantise: str, kind: str
) -> None:
    """Bytes of the file stay bytes where nothing else is asked for: then no weight is rounded."""
    mix = Mix(**SIZES)
    model = block_model(contrib(mix, Contrib(bits=bits)), width=mix.width)
    document = graph_document(model) | {"quantise": quantise}
    directory = write_submission(tmp_path, {"model": model}, document)
    module = lowered(directory).module
    experts = [w for w in module.weights if w.section.startswith("expert.")]
    assert {weight.kind for weight in experts} == {kind}
    assert all(lies_on_grid(weight.array) for weight in experts) == (kind == "w8" or bits < 32)
    if kind == "w8":
        assert module_difference(directory, module, 9) < (1e-5 if bits == 8 else 2e-2)
