"""Hostile ONNX submissions, deterministic: named attacks on small models, and random damage."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from tests.factories.onnx_blocks import (
    GraphBuilder,
    block_model,
    layer_norm_block,
    linear,
    mlp_block,
    moe_block,
    native_moe_block,
)
from tests.factories.onnx_models import graph_document, write_submission

Attack = Callable[[onnx.ModelProto, random.Random, Path], None]
INTEGERS = (-1, 0, 1, 2, 3, 7, 2**31, 2**40, 2**62, -(2**63))
DTYPES = ("float64", "int64", "float16", "int32", "bool", "uint8")


def written_block(b: GraphBuilder, x: str) -> str:
    """Operators that become others while importing."""
    x = b.op("Einsum", x, b.weight(8, 8), equation="bsd,de->bse")
    x = b.op("Add", x, b.op("EyeLike", b.weight(1, 8), k=3))
    halves = b.op("SplitToSequence", x, b.ints(5, 3), axis=2)
    x = b.op("ConcatFromSequence", halves, axis=2)
    waves = b.op("DFT", b.weight(1, 6, 1), b.const(8, "int64"), axis=1, onesided=1)
    kept = b.op(
        "Compress", b.op("Reshape", waves, b.ints(-1)), b.const([False] + [True] * 8, "bool")
    )
    window = b.op("HannWindow", b.const(8, "int64"))
    return b.op("Mul", b.op("Add", x, kept), window)


def attention_block(b: GraphBuilder, x: str) -> str:
    """One head over all rows, with shape arithmetic around it."""
    sizes = b.op("Concat", b.ints(1), b.op("Shape", x, start=1, end=2), b.ints(8), axis=0)
    q, k, v = (b.op("Reshape", linear(b, x, 8, 8), sizes) for _ in range(3))
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 2, 1]))
    weights = b.op("Softmax", b.op("Mul", scores, b.const(0.35)), axis=-1)
    return b.op("Add", x, b.op("MatMul", weights, v))


SEEDS: Mapping[str, onnx.ModelProto] = {
    "mlp": block_model(mlp_block),
    "written": block_model(written_block),
    "norm": block_model(layer_norm_block),
    "gathered": block_model(moe_block()),
    "functions": block_model(native_moe_block),
    "attention": block_model(attention_block),
}


@dataclass(frozen=True)
class Mutant:
    """One hostile submission: which model, which attack, which random numbers."""

    model: str
    attack: str
    seed: int

    def write(self, directory: Path) -> Path:
        """Write the submission and return its directory."""
        model = onnx.ModelProto()
        model.CopyFrom(SEEDS[self.model])
        write_submission(directory, {"model": model}, graph_document(model))
        chooser = random.Random(f"{self.model} {self.attack} {self.seed}")
        ATTACKS[self.attack](model, chooser, directory)
        return directory


def save(model: onnx.ModelProto, directory: Path) -> None:
    (directory / "model.onnx").write_bytes(model.SerializeToString())


# --- damage ---------------------------------------------------------------------------------------


def flip_bytes(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    data = bytearray(model.SerializeToString())
    for _ in range(chooser.randrange(1, 5)):
        data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
    (directory / "model.onnx").write_bytes(bytes(data))


def truncate(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    data = model.SerializeToString()
    (directory / "model.onnx").write_bytes(data[: chooser.randrange(len(data))])


def damage_sizes(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    tensor = chooser.choice(model.graph.initializer)
    if tensor.dims:
        tensor.dims[chooser.randrange(len(tensor.dims))] = chooser.choice(INTEGERS)
    else:
        tensor.dims.append(chooser.choice(INTEGERS))
    save(model, directory)


def damage_numbers(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    tensor = chooser.choice(model.graph.initializer)
    array = numpy_helper.to_array(tensor).copy()
    match chooser.randrange(4):
        case 0:
            array.reshape(-1)[chooser.randrange(array.size)] = chooser.choice([0, -1, 1000, 7])
        case 1:
            array = array.reshape(-1)
        case 2:
            array = array.astype(chooser.choice(DTYPES))
        case _:
            array = array[..., None] if chooser.random() < 0.5 else np.zeros((0,), array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    save(model, directory)


def damage_shape_data(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    """Put hostile numbers into the operands that say shapes, axes and counts."""
    integers = [t for t in model.graph.initializer if t.data_type == TensorProto.INT64]
    for tensor in integers or model.graph.initializer:
        array = numpy_helper.to_array(tensor).copy()
        if array.size and array.dtype == np.int64:
            array.reshape(-1)[chooser.randrange(array.size)] = chooser.choice(INTEGERS)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    save(model, directory)


def damage_node(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    node = chooser.choice(model.graph.node)
    match chooser.randrange(4):
        case 0 if node.attribute:
            attribute = chooser.choice(node.attribute)
            if attribute.type == onnx.AttributeProto.INT:
                attribute.i = chooser.choice(INTEGERS)
            elif attribute.ints:
                attribute.ints[chooser.randrange(len(attribute.ints))] = chooser.choice(INTEGERS)
            else:
                attribute.f = chooser.choice([0.0, float("nan"), float("inf"), -1.0])
        case 1:
            node.op_type = chooser.choice([other.op_type for other in model.graph.node])
        case 2 if len(node.input) > 1:
            i, j = chooser.sample(range(len(node.input)), 2)
            node.input[i], node.input[j] = node.input[j], node.input[i]
        case _:
            at = chooser.randrange(len(node.input))
            node.input[at] = chooser.choice([t.name for t in model.graph.initializer])
    save(model, directory)


# --- hostile structure ----------------------------------------------------------------------------


def input_sizes(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    for dim in model.graph.input[0].type.tensor_type.shape.dim:
        if chooser.random() < 0.6:
            dim.dim_value = chooser.choice(INTEGERS)
    save(model, directory)


def cycle(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    first, last = model.graph.node[0], model.graph.node[-1]
    if chooser.random() < 0.5:
        first.input[0] = last.output[0]
    else:
        node = chooser.choice(model.graph.node)
        node.input[0] = node.output[0]
    save(model, directory)


def twice(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    match chooser.randrange(4):
        case 0:
            model.graph.initializer.append(chooser.choice(model.graph.initializer))
        case 1:
            model.graph.node.append(chooser.choice(model.graph.node))
        case 2:
            model.graph.input.append(model.graph.input[0])
        case _:
            model.graph.output.append(model.graph.output[0])
    save(model, directory)


def not_numbers(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    floats = [t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT]
    tensor = chooser.choice(floats)
    array = numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[chooser.randrange(array.size)] = chooser.choice([np.nan, np.inf, -np.inf])
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    save(model, directory)


def endless_function(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    """Functions that call themselves, each other, or twice as many at every level."""
    names = [f"F{i}" for i in range(chooser.choice([1, 2, 60, 400]))]
    ends = "loop" if chooser.random() < 0.5 else "grow"
    for at, name in enumerate(names):
        inner = names[(at + 1) % len(names)] if ends == "loop" or at + 1 < len(names) else "Relu"
        domain = "" if inner == "Relu" else "hostile."
        body = f"a = {domain}{inner} (x) y = {domain}{inner} (a)"
        text = (
            f'<domain: "hostile", opset_import: ["" : 18, "hostile" : 1]> {name} (x) => (y)'
            f" {{ {body} }}"
        )
        model.functions.append(parser.parse_function(text))
    model.opset_import.append(helper.make_opsetid("hostile", 1))
    call = helper.make_node("F0", [model.graph.node[-1].input[0]], ["called"], domain="hostile")
    model.graph.node.insert(len(model.graph.node) - 1, call)
    model.graph.node[-1].input[0] = "called"
    save(model, directory)


def nested_graphs(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", [model.graph.node[-1].input[0]], ["deep"])],
        "leaf",
        [],
        [onnx.ValueInfoProto(name="deep")],
    )
    for level in range(chooser.choice([1, 20, 24, 200])):
        node = helper.make_node(
            "If", ["yes"], [f"r{level}"], then_branch=graph, else_branch=graph, name=f"if{level}"
        )
        graph = helper.make_graph([node], f"g{level}", [], [onnx.ValueInfoProto(name=f"r{level}")])
        if graph.ByteSize() > 1 << 15:
            break
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.insert(len(model.graph.node) - 1, graph.node[0])
    model.graph.node[-1].input[0] = graph.node[0].output[0]
    save(model, directory)


def huge_constant(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    """Constants that are a few bytes in the file and do not fit into any machine."""
    count = chooser.choice([2**24, 2**31, 2**40, 2**62])

    def ints(name: str, values: list[int]) -> str:
        model.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    one = numpy_helper.from_array(np.ones((1,), np.float32), "h_one")
    model.graph.initializer.append(one)
    match chooser.randrange(5):
        case 0:
            node = helper.make_node("ConstantOfShape", [ints("h_n", [count])], ["h_big"])
        case 1:
            node = helper.make_node("Tile", ["h_one", ints("h_n", [count])], ["h_big"])
        case 2:
            for name, number in (("h_a", 0), ("h_b", count), ("h_c", 1)):
                scalar = numpy_helper.from_array(np.array(number, np.int64), name)
                model.graph.initializer.append(scalar)
            node = helper.make_node("Range", ["h_a", "h_b", "h_c"], ["h_big"])
        case 3:
            node = helper.make_node("Expand", ["h_one", ints("h_n", [count])], ["h_big"])
        case _:
            wide = helper.make_node("Expand", ["h_one", ints("h_n", [count >> 12])], ["h_wide"])
            model.graph.node.insert(0, wide)
            outer = ints("h_s", [4096, 1])
            tall = helper.make_node("Expand", ["h_one", outer], ["h_tall"])
            model.graph.node.insert(0, tall)
            node = helper.make_node("Add", ["h_wide", "h_tall"], ["h_big"])
    at = len(model.graph.node) - 1
    total = helper.make_node("ReduceMax", ["h_big"], ["h_sum"], keepdims=0)
    cast = helper.make_node("Cast", ["h_sum"], ["h_cast"], to=TensorProto.FLOAT)
    add = helper.make_node("Add", [model.graph.node[-1].input[0], "h_cast"], ["h_out"])
    for node_at, made in enumerate((node, total, cast, add)):
        model.graph.node.insert(at + node_at, made)
    model.graph.node[-1].input[0] = "h_out"
    save(model, directory)


LOCATIONS = (
    *("nowhere.bin", "../secret.bin", "folder/../../secret.bin", "..\\secret.bin", "C:\\x.bin"),
    *("/etc/passwd", "/dev/zero", "link.bin", "folder", "", ".", "a\0b", "weights.bin"),
)


def external_data(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    """References to bytes that are not there, not ours, or not as many."""
    (directory / "weights.bin").write_bytes(b"\0" * 64)
    (directory.parent / "secret.bin").write_bytes(b"\0" * 65536)
    link = directory / "link.bin"
    link.unlink(missing_ok=True)
    link.symlink_to(directory.parent / "secret.bin")
    (directory / "folder").mkdir(exist_ok=True)
    location = chooser.choice(LOCATIONS)
    tensor = chooser.choice(model.graph.initializer)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    if chooser.random() < 0.7:
        number = chooser.choice(["-1", "60", str(2**62), "1e3", "", "99999999999999999999", "0"])
        tensor.external_data.add(key=chooser.choice(["offset", "length"]), value=number)
    save(model, directory)


def long_chain(model: onnx.ModelProto, chooser: random.Random, directory: Path) -> None:
    """Many nodes in a row: nothing may recurse along them."""
    last = model.graph.node[-1]
    source = last.input[0]
    kinds = [chooser.choice(["Neg", "Relu", "Identity", "Exp"]) for _ in range(80)]
    tail = onnx.NodeProto()
    tail.CopyFrom(last)
    del model.graph.node[-1]
    for at, kind in enumerate(kinds):
        model.graph.node.append(helper.make_node(kind, [source], [f"chain{at}"]))
        source = f"chain{at}"
    tail.input[0] = source
    model.graph.node.append(tail)
    save(model, directory)


ATTACKS: Mapping[str, Attack] = {
    attack.__name__: attack
    for attack in (
        flip_bytes,
        truncate,
        damage_sizes,
        damage_numbers,
        damage_shape_data,
        damage_node,
        input_sizes,
        cycle,
        twice,
        not_numbers,
        endless_function,
        nested_graphs,
        huge_constant,
        external_data,
        long_chain,
    )
}


SLOW: Mapping[str, int] = {"long_chain": 1, "nested_graphs": 1}
"""Attacks that cost a second: so many times at most."""


def mutants(per_attack: int, first_seed: int = 0) -> list[Mutant]:
    """Return the corpus: every attack on every model, `per_attack` times, slow ones less often."""
    return [
        Mutant(model, attack, first_seed + at)
        for model in SEEDS
        for attack in ATTACKS
        for at in range(min(per_attack, SLOW.get(attack, per_attack)))
    ]
