"""A submission directory to an IR module with one function per component."""

from collections.abc import Sequence
from pathlib import Path

import onnx
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.utils.exceptions import VerifyException

from compiler.analysis.constants import ConstantTable
from compiler.dialects.dims import witnesses
from compiler.errors import MalformedModelError
from compiler.frontend.build import Argument, FunctionBuilder
from compiler.frontend.contrib_bodies import expand_contrib
from compiler.frontend.evaluate import Family, bind_shape, evaluate, same_everywhere
from compiler.frontend.function_bodies import check_function_bodies, inline_operators
from compiler.frontend.length_values import attention_mask
from compiler.frontend.limits import DEFAULT_LIMITS, FoldBudget, ImportLimits
from compiler.frontend.moe_repair import repair_experts
from compiler.frontend.node_numbers import number_nodes, settle_imported
from compiler.frontend.onnx_file import opset_of, read_model
from compiler.frontend.pipeline_json import read_pipeline
from compiler.frontend.signature import constant_value, element_type, input_type, pinned_type
from compiler.frontend.values import Known
from compiler.passes.base import ImportedPipeline
from compiler.passes.origins import Origins
from compiler.passes.pipeline_spec import Component, Port

SYMBOLS = ("P", "T")


def import_pipeline(directory: Path, limits: ImportLimits = DEFAULT_LIMITS) -> ImportedPipeline:
    """Read a submission: `pipeline.json` and the ONNX files it names.

    Args:
        directory: Where the files are; nothing outside it is read.
        limits: What the files may cost; seconds and memory are the business of
            `compiler.driver.vet`.

    Returns:
        One function per component, arguments and results marked with their roles. Renaming values
        and reordering nodes of the files does not change a byte of the module's text.

    Raises:
        MalformedModelError: A file is missing, broken, or contradicts `pipeline.json`.
        UnsupportedOperatorError: A node's operator has no rule; the message names both.
        MissingExpertsError: A router chooses among more experts than its file holds.
        LimitError: A file or what folding makes of it is larger than the limits.
    """
    spec = read_pipeline(directory)
    constants, origins = ConstantTable(), Origins()
    functions: list[FuncOp] = []
    notes: list[str] = []
    for component in spec.components:
        model = read_model(directory / component.file, limits)
        number_nodes(model, component.name, origins)
        check_function_bodies(model, component.file)
        model = inline_operators(model, component.file)
        expand_contrib(model)
        notes += repair_experts(model, component.file)
        functions.append(_import_component(component, model, constants, origins, limits))
        notes.append(
            f"{component.name}: {len(model.graph.node)} nodes, opset {opset_of(model)},"
            f" {len(model.graph.initializer)} initializers"
        )
    module = ModuleOp(functions)
    try:
        module.verify()
    except VerifyException as error:
        reason = str(error).strip().splitlines()[-1]
        raise MalformedModelError(f"shapes contradict each other: {reason}") from error
    return ImportedPipeline(spec, module, constants, origins, tuple(notes))


def _import_component(
    component: Component,
    model: onnx.ModelProto,
    constants: ConstantTable,
    origins: Origins,
    limits: ImportLimits,
) -> FuncOp:
    graph = model.graph
    initializers = {initializer.name for initializer in graph.initializer}
    infos = {info.name: info for info in graph.input if info.name not in initializers}
    bindings = witnesses(SYMBOLS)
    arguments: list[Argument] = []
    families: dict[str, Family] = {}
    for port in _in_order(component.inputs, list(infos)):
        info = _lookup(port, infos, component, "input")
        if port.role == "constant":
            array = constant_value(port, info, component.name)
            families[port.name] = same_everywhere(array, bindings)
            continue
        if port.role == "attention_mask":
            dtype = element_type(info, f"input {port.name!r} of {component.name}")
            families[port.name] = tuple(Known(attention_mask(b, dtype)) for b in bindings)
            continue
        if port.shape is None:
            dtype, shape = input_type(port, info, component.name)
        else:
            dtype, shape = pinned_type(port, port.shape, info, component.name)
        arguments.append(Argument(port.name, port.role, dtype, shape))
        families[port.name] = bind_shape(shape, dtype, bindings)
    declared = {info.name: info for info in graph.output}
    outputs = [
        (port.name, port.role)
        for port in _in_order(component.outputs, list(declared))
        if _lookup(port, declared, component, "output") and port.role != "unused"
    ]
    budget = FoldBudget(limits)
    wanted = [name for name, _ in outputs]
    evaluation = evaluate(graph, families, wanted, bindings, budget, opset_of(model))
    builder = FunctionBuilder(component.name, evaluation, constants, origins)
    func = builder.build(arguments, outputs)
    settle_imported(component.name, func, evaluation.reached, origins)
    return func


def _in_order(ports: Sequence[Port], file_order: list[str]) -> list[Port]:
    """Return ports by role; equal roles in the order of the file's interface."""
    place = {name: at for at, name in enumerate(file_order)}
    return sorted(ports, key=lambda port: (port.role, place.get(port.name, len(place))))


def _lookup(
    port: Port, infos: dict[str, onnx.ValueInfoProto], component: Component, what: str
) -> onnx.ValueInfoProto:
    if port.name not in infos:
        raise MalformedModelError(
            f"{component.file} has no {what} {port.name!r}",
            hint=f"{what}s of the file: {', '.join(sorted(infos)) or 'none'}",
        )
    return infos[port.name]
