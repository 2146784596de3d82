"""The model that each pass is shown on, and how its golden file is written."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from xdsl.dialects.builtin import ModuleOp

from compiler.dialects.sp import ConstantOp, LinearOp
from compiler.dialects.text import print_module
from compiler.frontend import import_pipeline
from compiler.passes.base import Pass, PassContext
from compiler.passes.functions import functions, operations
from compiler.passes.inject_masks import InjectMasks, encode_masks
from compiler.passes.pipeline import STAGES
from compiler.passes.remove_columns import Removal, RemoveColumns
from tests.factories.attention_blocks import Planted, attention_block
from tests.factories.image_models import MIDDLES, between, write_image_block
from tests.factories.int8_blocks import Bytes, int8_block
from tests.factories.moe_contrib import contrib
from tests.factories.moe_shapes import Mix
from tests.factories.onnx_adapters import SMALL_WIDTH, adapter_block
from tests.factories.onnx_blocks import (
    GraphBuilder,
    elementwise_block,
    gemm_block,
    moe_block,
    native_moe_block,
    rms_block,
)
from tests.factories.onnx_models import (
    TinyShape,
    write_block,
    write_pruned,
    write_tiny,
    write_windowed,
)

SEPARATOR = "// -----\n"
HERE = Path(__file__).parent
SMALL = TinyShape(layers=1, keep=3, side=4, width=8, vocabulary=8, experts=3, hidden=4)


def movement_block(b: GraphBuilder, x: str) -> str:
    """Views, equal operations and a constant that is moved."""
    rows = b.op("Reshape", x, b.ints(-1, 8))
    back = b.op("Reshape", rows, b.ints(1, -1, 8))
    table = b.op("Reshape", b.weight(2, 4), b.ints(8))
    first, second = b.op("Relu", back), b.op("Relu", back)
    return b.op("Add", b.op("Mul", first, table), second)


def sparse_block(b: GraphBuilder, x: str) -> str:
    """A linear layer most of whose tiles are empty, after one without an empty tile."""
    wide = b.op("MatMul", x, b.const(np.ones((8, 64), np.float32)))
    weight = np.zeros((64, 64), np.float32)
    weight[32:40, 16:32] = 1.0
    return b.op("MatMul", wide, b.const(weight))


def tiles_block(b: GraphBuilder, x: str) -> str:
    """A product whose weight has dead tiles, behind a ReLU."""
    weight = b.rng.standard_normal((32, 32)) * 0.3
    weight[:16, 16:] = 0
    up = b.op("MatMul", x, b.weight(8, 32))
    wide = b.op("MatMul", b.op("Relu", up), b.const(weight))
    return b.op("MatMul", b.op("Mul", wide, up), b.weight(32, 8))


def affine_block(b: GraphBuilder, x: str) -> str:
    """A batch norm, a shift and a scale behind a convolution over channels."""
    planes = b.op("Transpose", x, perm=[0, 2, 1])
    y = b.op("Conv", planes, b.weight(6, 8, 1), b.weight(6), kernel_shape=[1])
    statistics = (b.weight(6), b.weight(6), b.weight(6), b.const(np.arange(1, 7)))
    y = b.op("BatchNormalization", y, *statistics)
    y = b.op("Mul", b.op("Add", y, b.weight(6, 1)), b.const(2.0))
    y = b.op("Conv", y, b.weight(8, 6, 1), kernel_shape=[1])
    return b.op("Transpose", y, perm=[0, 2, 1])


def dead_channel_block(b: GraphBuilder, x: str) -> str:
    """Two linear layers; one hidden channel is never read, one is always zero."""
    w_in, w_out = (0.1 * np.arange(1, 49, dtype=np.float32) for _ in range(2))
    w_in, w_out = w_in.reshape(8, 6), w_out.reshape(6, 8)
    w_in[:, 1], w_out[4] = 0, 0
    bias = np.float32([0.1, -0.5, 0.2, 0.3, 0.4, 0.5])
    hidden = b.op("Add", b.op("MatMul", x, b.const(w_in)), b.const(bias))
    return b.op("MatMul", b.op("Relu", hidden), b.const(w_out))


def relu_block(b: GraphBuilder, x: str) -> str:
    """A product over what a ReLU left, wide enough for a check."""
    up = b.op("Relu", b.op("MatMul", x, b.weight(8, 256)))
    return b.op("MatMul", up, b.weight(256, 64))


DEAD_HEAD = Planted(heads=4, kv_heads=2, head_dim=4, unread=(0, 2), silent=(1,))
"""Group 1 has no values, and of group 0 only query 1 is read."""

Writer = Callable[[Path], Path]

TINY_PART: Mapping[str, str] = {
    "raise-rope": "decoder",
    "raise-attention": "decoder",
    "raise-cache": "decoder",
    "raise-prune": "vision",
    "adapt-pruning": "vision",
    "raise-conv": "vision",
    "last-row": "step",
    "fuse-groups": "step",
    "plan-kv": "step",
}
"""The one function of a large model that a golden file shows."""

CASES: Mapping[str, Writer] = {
    "canonicalise": lambda d: write_block(d, movement_block),
    "fold-affine": lambda d: write_block(d, affine_block),
    "raise-norm": lambda d: write_block(d, rms_block()),
    "raise-int8": lambda d: write_block(d, int8_block(), width=Bytes().cols),
    "raise-linear": lambda d: write_block(d, gemm_block),
    "raise-rope": lambda d: write_tiny(d, SMALL),
    "raise-moe-native": lambda d: write_block(d, native_moe_block),
    "raise-moe-contrib": lambda d: write_block(d, contrib(Mix()), width=Mix().width),
    "raise-moe-experts": lambda d: write_block(d, moe_block()),
    "raise-moe-router": lambda d: write_block(d, moe_block()),
    "raise-attention": lambda d: write_tiny(d, SMALL),
    "raise-cache": lambda d: write_tiny(d, SMALL),
    "raise-prune": lambda d: write_tiny(d, SMALL),
    "raise-conv": lambda d: write_tiny(d, SMALL),
    "raise-elementwise": lambda d: write_block(d, elementwise_block),
    "sink-layouts": lambda d: write_image_block(d, between(MIDDLES["squeezed"])),
    "drop-dead-channels": lambda d: write_block(d, dead_channel_block),
    "drop-dead-heads": lambda d: write_block(d, attention_block(DEAD_HEAD), width=16),
    "remove-columns": lambda d: write_block(d, dead_channel_block),
    "adapt-pruning": lambda d: write_pruned(d, SMALL, p=0.7, merge=1),
    "compose": lambda d: write_tiny(d, SMALL),
    "last-row": lambda d: write_tiny(d, SMALL),
    "inject-masks": lambda d: write_block(d, gemm_block),
    "detect-sources": lambda d: write_block(d, tiles_block),
    "derive-structure": lambda d: write_block(d, tiles_block),
    "propagate-masks": lambda d: write_block(d, elementwise_block),
    "select-kernels": lambda d: write_block(d, moe_block()),
    "merge-adapters": lambda d: write_block(d, adapter_block, width=SMALL_WIDTH),
    "assign-layouts": lambda d: write_block(d, sparse_block),
    "check-zeros": lambda d: write_block(d, relu_block),
    "fuse-groups": lambda d: write_tiny(d, SMALL),
    "plan-kv": lambda d: write_windowed(d, SMALL, sink=1, window=8, max_step_tokens=4),
}


def golden_path(name: str) -> Path:
    return HERE / f"{name}.irtest"


def prepared(name: str, directory: Path) -> tuple[Pass, ModuleOp, PassContext]:
    """Return the pass and the module that it gets, after all passes before it."""
    imported = import_pipeline(CASES[name](directory))
    module, ctx = imported.module, imported.context()
    for stage in STAGES.values():
        for current in stage:
            if current.name == name:
                for func in functions(module):
                    if func.sym_name.data != TINY_PART.get(name, func.sym_name.data):
                        module.body.block.erase_op(func)
                return _configured(current, module, ctx), module, ctx
            current.run(module, ctx)
    raise KeyError(name)


def _configured(current: Pass, module: ModuleOp, ctx: PassContext) -> Pass:
    """Return the pass, with a mask of the first matrix or a removal from the last if need be."""
    if isinstance(current, RemoveColumns):
        second = [op for op in operations(module) if isinstance(op, LinearOp)][-1].weight.owner
        assert isinstance(second, ConstantOp)
        rows = ctx.constants.of(second).shape[0]
        bias = tuple(float(row) for row in range(rows))
        return RemoveColumns((Removal(second.sha256.data, ((1, 2),), bias),))
    if not isinstance(current, InjectMasks):
        return current
    constants = [op for op in operations(module) if isinstance(op, ConstantOp)]
    first = next(op for op in constants if ctx.constants.of(op).ndim == 2)
    bits = np.arange(ctx.constants.of(first).size).reshape(ctx.constants.of(first).shape) % 3 > 0
    return InjectMasks(encode_masks({first.sha256.data: bits}))


def golden_text(name: str, directory: Path) -> str:
    """Return what the golden file must hold."""
    current, module, ctx = prepared(name, directory)
    before = print_module(module)
    current.run(module, ctx)
    return before + SEPARATOR + print_module(module)
