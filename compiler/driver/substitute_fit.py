"""Fit the narrow layers of a module to its calibration record, or read those of a base bundle.

Called by `compiler.driver.substitutes`.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from compiler.contract.operations import Op
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.plan_format import Kind
from compiler.contract.substitutes import Substitute
from compiler.emitters.plan import read_packed
from compiler.emitters.substitutes import (
    DENSE_SECTION,
    NoSubstituteError,
    RoutedLayer,
    narrow_names,
)
from compiler.kernels.program import ABSENT, Buffer, Call, Module, Program, call_params
from compiler.quant.narrow_dense import (
    ACTS,
    MOST_ROWS,
    ExpertMatrices,
    NarrowLayer,
    Pack,
    RoutedRows,
    fit_narrow,
    narrow_width,
)
from compiler.quant.record import CalibrationRecord, RouterSample
from compiler.quant.w4 import PackedW4, dequantise_w4, unpack_w4
from compiler.simulator import Simulator


def calibration_rows(
    module: Module, layers: Mapping[int, RoutedLayer], record: CalibrationRecord
) -> dict[int, RoutedRows]:
    """Return what the routers of a module give for the rows that calibration kept, by layer.

    Raises:
        NoSubstituteError: Calibration never reached a layer.
    """
    samples = {sample.layer: sample for sample in record.routers if len(sample.inputs)}
    missing = sorted(layers.keys() - samples.keys())
    if missing:
        raise NoSubstituteError(f"calibration never reached the experts of layer {missing[0]}")
    return {number: _rows(module, layer, samples[number]) for number, layer in layers.items()}


def _rows(module: Module, layer: RoutedLayer, sample: RouterSample) -> RoutedRows:
    """Run the router alone, in f64."""
    every = slice(None, None, max(1, -(-len(sample.inputs) // MOST_ROWS)))
    inputs = sample.inputs[every]
    params = call_params(layer.route)
    if layer.route.op is Op.MOE_LAYER:
        params = {name: params[name] for name in ("k", "order")}
    k, rows = int(params["k"]), len(inputs)
    buffers = (
        Buffer(0, rows, True, inputs.shape[1], "f32"),
        Buffer(1, rows, True, k, "i32"),
        Buffer(2, rows, True, k, "f32"),
    )
    old = [at for at in layer.router if at != ABSENT]
    numbers = {ABSENT: ABSENT, **{at: number for number, at in enumerate(old)}}
    weights = tuple(replace(module.weights[at], id=number) for number, at in enumerate(old))
    operands = tuple(numbers[at] for at in layer.router)
    call = Call(Op.ROUTE, (0,), (1, 2), operands, params)
    program = Program("route", (call,), {"x": 0}, {"index": 1, "gate": 2})
    router = Module((program,), buffers, weights, None, rows)
    found = Simulator(router, mode="f64").run_arrays("route", {"x": inputs})
    return RoutedRows(inputs, found["index"], found["gate"], sample.vision[every])


def fitted_layers(
    module: Module,
    layers: Mapping[int, RoutedLayer],
    rows: Mapping[int, RoutedRows],
    pack: Pack,
) -> dict[int, NarrowLayer]:
    """Return a narrow layer for every routed one.

    Raises:
        NoSubstituteError: There is no narrow layer of this kind.
    """
    found = {}
    for number, layer in layers.items():
        if layer.act not in ACTS:
            raise NoSubstituteError(f"no dense layer has the activation {layer.act.name.lower()}")
        experts = [_matrices(module, weights) for weights in layer.experts]
        width = narrow_width(experts[0].w_out.shape[1])
        if not width:
            raise NoSubstituteError(
                "the experts are too narrow: half of one is no group of columns"
            )
        found[number] = fit_narrow(rows[number], experts, layer.act, width, pack)
    return found


def _matrices(module: Module, weights: tuple[int, ...]) -> ExpertMatrices:
    return ExpertMatrices(*(module.weights[at].array for at in weights))


def kept_layers(
    layers: Mapping[int, RoutedLayer], base: Mapping[str, bytes], kinds: Collection[Substitute]
) -> tuple[dict[int, NarrowLayer], dict[int, NDArray[np.float32]]]:
    """Return the narrow layers and the biases of full layers that a base bundle has.

    Args:
        layers: Those of the new version.
        base: Sections of the base.
        kinds: Its substitutes.

    Raises:
        ContractError: The base cannot be read.
        KeyError: It lacks a section.
    """
    plan = parse_plan(base["plan"])
    narrow, biases = {}, {}
    for number, layer in layers.items():
        arrays, packed = _section(plan, base, DENSE_SECTION.format(number))
        if Substitute.NARROW_DENSE in kinds:
            names = narrow_names(layer)
            first = {name: arrays[at] for at, name in enumerate(names)}
            codes = {name: packed[at] for at, name in enumerate(names) if at in packed}
            narrow[number] = NarrowLayer(first, codes, 0.0)
        if Substitute.FULL_DENSE in kinds:
            biases[number] = arrays[max(arrays)]
    return narrow, biases


def _section(
    plan: Plan, base: Mapping[str, bytes], name: str
) -> tuple[dict[int, NDArray[np.float32]], dict[int, PackedW4]]:
    """Return the values of the weights of a section and their packed forms, by place in it."""
    own = tuple(w for w in plan.weights if plan.sections[w.section].name == name)
    packed = read_packed(replace(plan, weights=own), base)
    arrays = {at: dequantise_w4(unpack_w4(codes)) for at, codes in packed.items()}
    for at, weight in enumerate(own):
        if weight.kind is Kind.F32:
            data = base[name][weight.offset : weight.offset + weight.length]
            arrays[at] = np.frombuffer(data, "<f4").astype(np.float32)
    return arrays, packed
