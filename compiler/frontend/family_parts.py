"""Surgery on the parts of a multimodal model, so that they fit the roles of a submission.

`families` calls these on checked models. Each returns a model that computes the same as the one it
was given on the inputs that remain; what cannot be shown to be the same is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import compose, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from compiler.errors import MalformedModelError
from compiler.frontend.values import Array

PIXEL_LEVELS: Final = 255.0
PREFIX: Final = "second/"
TOLERANCE: Final = 1e-6
MOST: Final = 1_000_000
"""No mean or deviation of pixels is larger."""


@dataclass(frozen=True, slots=True)
class Normalisation:
    """`(pixel / 255 - mean) / std` per channel, or the same with one number for all."""

    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Normalisation":
        """Read it from a preprocessor's configuration; nothing said means 0 to 1.

        Raises:
            MalformedModelError: Not three finite numbers each, or a deviation of zero.
        """
        if config.get("do_normalize") is False:
            return Normalisation()
        mean, std = config.get("image_mean", [0.0] * 3), config.get("image_std", [1.0] * 3)
        good = all(
            isinstance(row, list)
            and len(row) == 3
            and all(isinstance(x, int | float) and abs(x) <= MOST for x in row)
            for row in (mean, std)
        )
        if not good or min(std) <= 0:
            raise MalformedModelError(
                f"image_mean and image_std must be three numbers each, at most {MOST}",
                hint="preprocessor_config.json says them; deviations are above 0",
            )
        return Normalisation(tuple(map(float, mean)), tuple(map(float, std)))

    @property
    def is_uniform(self) -> bool:
        """Whether all channels are treated alike."""
        return len(set(self.mean)) == 1 and len(set(self.std)) == 1

    def as_json(self) -> dict[str, float]:
        """Return `divide` and `subtract` of `pipeline.json`; only for a uniform one."""
        return {"divide": PIXEL_LEVELS * self.std[0], "subtract": self.mean[0] / self.std[0]}


def chain(first: onnx.ModelProto, second: onnx.ModelProto) -> onnx.ModelProto:
    """Join two models: the first output of one is the first input of the other.

    Raises:
        MalformedModelError: They cannot be joined.
    """
    stored = {tensor.name for tensor in second.graph.initializer}
    inputs = [info.name for info in second.graph.input if info.name not in stored]
    renamed = compose.add_prefix(second, PREFIX)
    pair = (first.graph.output[0].name, PREFIX + inputs[0])
    try:
        return compose.merge_models(first, renamed, io_map=[pair])
    except (ValueError, TypeError, RuntimeError, onnx.checker.ValidationError) as error:
        raise MalformedModelError(
            f"{second.graph.name!r} does not follow {first.graph.name!r}: {error}",
            hint="export both with the same opset and IR version",
        ) from error


def with_batch(
    model: onnx.ModelProto, pixels: str, features: str, config: Mapping[str, Any]
) -> onnx.ModelProto:
    """Fix the picture's size, put pixels and features first, and give features a batch axis.

    Raises:
        MalformedModelError: There is no such input or output, or nothing says the size.
    """
    graph = model.graph
    given = next((info for info in graph.input if info.name == pixels), None)
    made = next((info for info in graph.output if info.name == features), None)
    if given is None or made is None:
        raise MalformedModelError(
            f"vision has no input {pixels!r} or no output {features!r}",
            hint="it has " + ", ".join(info.name for info in (*graph.input, *graph.output)),
        )
    dims = given.type.tensor_type.shape.dim
    if len(dims) != 4:
        raise MalformedModelError(
            f"vision input {pixels!r} has {len(dims)} axes, expected batch, channel, height, width"
        )
    for dim, size in zip(dims[1:], (3, *_picture(config)), strict=True):
        if not dim.HasField("dim_value") and size:
            dim.dim_value = size
    others = [info for info in graph.input if info.name != pixels]
    rest = [info for info in graph.output if info.name != features]
    _replace(graph.input, [given, *others])
    if len(made.type.tensor_type.shape.dim) == 2:
        made = _lifted(graph, made)
    _replace(graph.output, [made, *rest])
    return model


def _picture(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return height and width as a preprocessor's configuration says; 0 if it does not."""
    for key in ("crop_size", "size", "image_size"):
        said = config.get(key)
        if isinstance(said, int) and said > 0:
            return said, said
        table = said if isinstance(said, dict) else {}
        if "shortest_edge" in table:
            table = {"height": table["shortest_edge"], "width": table["shortest_edge"]}
        height, width = table.get("height"), table.get("width")
        if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:
            return height, width
    return 0, 0


def _replace(field: Any, items: list[Any]) -> None:  # noqa: ANN401 - repeated fields have no type
    copies = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(copies)


def _lifted(graph: onnx.GraphProto, made: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Append the batch axis to features of (tokens, width)."""
    axes, name = f"{made.name}/axes", f"{made.name}/batch"
    graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), axes))
    graph.node.append(helper.make_node("Unsqueeze", [made.name, axes], [name]))
    sizes = [d.dim_value or d.dim_param or None for d in made.type.tensor_type.shape.dim]
    return helper.make_tensor_value_info(name, made.type.tensor_type.elem_type, [1, *sizes])


def take_branch(model: onnx.ModelProto, flag: str, *, value: bool) -> onnx.ModelProto:
    """Decide every `If` over the input `flag`, as old merged decoders have one.

    Args:
        model: Changed in place; without such an input it stays as it is.
        flag: The input, a truth value.
        value: What it is from now on.

    Returns:
        The model without the input.
    """
    graph = model.graph
    given = [info for info in graph.input if info.name != flag]
    if len(given) == len(graph.input):
        return model
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "If" or node.input[0] != flag:
            nodes.append(node)
            continue
        branches = {attribute.name: attribute.g for attribute in node.attribute}
        taken = branches["then_branch" if value else "else_branch"]
        graph.initializer.extend(taken.initializer)
        nodes.extend(taken.node)
        nodes.extend(
            helper.make_node("Identity", [inner.name], [outer], name=f"{node.name}/{outer}")
            for inner, outer in zip(taken.output, node.output, strict=True)
        )
    _replace(graph.node, nodes)
    _replace(graph.input, given)
    return model


def image_sizes(model: onnx.ModelProto) -> tuple[int, int]:
    """Return height and width of a vision model's picture.

    Raises:
        MalformedModelError: They are not fixed.
    """
    dims = model.graph.input[0].type.tensor_type.shape.dim
    if not (dims[2].dim_value > 0 and dims[3].dim_value > 0):
        raise MalformedModelError(
            "nothing says the size of the picture",
            hint="export vision with fixed height and width, or add crop_size to"
            " preprocessor_config.json",
        )
    return dims[2].dim_value, dims[3].dim_value


def normalise_pixels(
    model: onnx.ModelProto, given: Normalisation
) -> tuple[onnx.ModelProto, Normalisation]:
    """Move a normalisation per channel into the convolution that reads the pixels.

    `W * ((x - mean) / std) + b = (W / std) * x + (b - sum(W * mean / std))`, exactly where the
    window never reads padding.

    Returns:
        The model, and what is left to do before it: the same for all channels.

    Raises:
        MalformedModelError: Channels differ, and something else than such a convolution reads them.
    """
    if given.is_uniform:
        return model, given
    graph = model.graph
    pixels = graph.input[0].name
    readers = [node for node in graph.node if pixels in node.input]
    stored = {tensor.name: tensor for tensor in graph.initializer}
    conv = readers[0] if len(readers) == 1 and readers[0].op_type == "Conv" else None
    if conv is None or not _folds(conv, stored):
        raise MalformedModelError(
            "image_mean and image_std differ between channels, and vision does not begin with a"
            " convolution without padding that could take them",
            hint="export vision with the normalisation in its graph and do_normalize = false",
        )
    weight = numpy_helper.to_array(stored[conv.input[1]]).astype(np.float64)
    around = (1, 3, *[1] * (weight.ndim - 2))
    mean, std = (np.array(row).reshape(around) for row in (given.mean, given.std))
    bias = np.zeros(len(weight))
    if len(conv.input) > 2 and conv.input[2]:
        bias = numpy_helper.to_array(stored[conv.input[2]]).astype(np.float64)
    shift = (weight * mean / std).reshape(len(weight), -1).sum(1)
    kept = numpy_helper.to_array(stored[conv.input[1]]).dtype
    for name, array in (("weight", weight / std), ("bias", bias - shift)):
        graph.initializer.append(numpy_helper.from_array(array.astype(kept), f"normalised/{name}"))
    conv.input[:] = [pixels, "normalised/weight", "normalised/bias"]
    return model, Normalisation()


def _folds(conv: onnx.NodeProto, stored: Mapping[str, onnx.TensorProto]) -> bool:
    attributes = {a.name: helper.get_attribute_value(a) for a in conv.attribute}
    padded = any(attributes.get("pads", ())) or attributes.get("auto_pad", b"NOTSET") not in (
        b"NOTSET",
        b"VALID",
    )
    constant = all(name in stored for name in conv.input[1:] if name)
    return constant and not padded and attributes.get("group", 1) == 1


def lookup_only(
    model: onnx.ModelProto, names: Mapping[str, str], image_token: int | None
) -> onnx.ModelProto:
    """Return the table look-up of an embedding model, without the splice of image features.

    A model that also takes features is run on random ids and features first: rows of the image
    token must come from the features, in order, and all others from the table.

    Raises:
        MalformedModelError: It does something else, or no image token is known.
    """
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    inputs = [info for info in graph.input if info.name not in stored]
    if len(inputs) == 1:
        return model
    ids = names.get("input_ids", "input_ids")
    gather = next((n for n in graph.node if n.op_type == "Gather" and n.input[1] == ids), None)
    features = [info for info in inputs if info.name != ids]
    if gather is None or gather.input[0] not in stored or len(features) != 1:
        raise MalformedModelError(
            f"the embedding model does not look up {ids!r} in a table, with one input of features",
            hint="its inputs: " + ", ".join(info.name for info in inputs),
        )
    if image_token is None:
        raise MalformedModelError(
            "no configuration file says which token stands for the image",
            hint="add image_token_id to config.json",
        )
    table = numpy_helper.to_array(stored[gather.input[0]])
    _check_splice(model, table, ids, features[0], image_token)
    return _only_gather(model, gather, stored[gather.input[0]], ids)


def _check_splice(
    model: onnx.ModelProto, table: Array, ids: str, features: onnx.ValueInfoProto, token: int
) -> None:
    chooser = np.random.default_rng(0)
    row = chooser.integers(0, len(table), 9)
    row[row == token] = (token + 1) % len(table)
    row[[2, 3, 6]] = token
    given = chooser.standard_normal((3, table.shape[1])).astype(table.dtype)
    wanted = table[row]
    wanted[row == token] = given
    batched = len(features.type.tensor_type.shape.dim) == 3
    try:
        made = ReferenceEvaluator(model).run(
            [model.graph.output[0].name],
            {ids: row[None].astype(np.int64), features.name: given[None] if batched else given},
        )
        found = np.asarray(next(iter(made)))
    except Exception as error:  # the evaluator raises whatever numpy and its operators raise
        raise MalformedModelError(f"the embedding model cannot be run: {error}") from error
    if found.shape != (1, *wanted.shape) or not np.allclose(found[0], wanted, atol=TOLERANCE):
        raise MalformedModelError(
            f"the embedding model does not put image features where token {token} stands",
            hint="image_token_id of the configuration must be the model's own",
        )


def _only_gather(
    model: onnx.ModelProto, gather: onnx.NodeProto, table: onnx.TensorProto, ids: str
) -> onnx.ModelProto:
    graph = model.graph
    given = next(info for info in graph.input if info.name == ids)
    made = helper.make_tensor_value_info(
        gather.output[0], table.data_type, [1, None, table.dims[1]]
    )
    flat = helper.make_graph([gather], "embed", [given], [made], [table])
    return helper.make_model(flat, opset_imports=model.opset_import, ir_version=model.ir_version)
