"""Operations verify, and their text reads back to itself."""

import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.utils.exceptions import ParseError, VerifyException

from compiler.dialects.dims import Dim, symbol_dim
from compiler.dialects.encoding import EncodingAttr
from compiler.dialects.mm import AttentionOp, KvAppendOp, PruneOp, RopeOp, SpliceOp
from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.movement import ConcatOp, ExpandOp, ReshapeOp, SliceOp, TransposeOp
from compiler.dialects.sp import BinaryOp, LinearOp, NormOp, OnnxOp
from compiler.dialects.text import parse_module, print_module
from compiler.dialects.types import shape_of, tensor_type

T, P = symbol_dim("T"), symbol_dim("P")


def value(*shape: Dim | int, dtype: str = "float32") -> SSAValue:
    return Block(arg_types=[tensor_type(dtype, shape)]).args[0]


def test_it_names_run_time_axes_in_the_type() -> None:
    x = value(1, P + T, 8)
    assert str(x.type) == 'tensor<1x?x8xf32, #sp.enc<dims ["P + T"]>>'
    assert shape_of(x) == (Dim(1), P + T, Dim(8))


def test_it_prints_and_parses_every_kind_of_operation() -> None:
    block = Block(arg_types=[tensor_type("float32", (1, T, 8)), tensor_type("int64", (1, T))])
    x, positions = block.args
    weight = value(16, 8)
    weight, bias, gamma, freq, stack_in, stack_out, router = (
        block.insert_arg(tensor_type("float32", shape), len(block.args))
        for shape in ((8, 8), (8,), (8,), (2,), (3, 4, 8), (3, 8, 4), (3, 8))
    )
    ops: list[Operation] = [NormOp(x, gamma, None, kind="rms", eps=1e-5)]
    ops.append(LinearOp(ops[0].results[0], weight, bias, act="silu"))
    ops.append(RopeOp(ops[1].results[0], positions, freq, heads=2))
    ops.append(KvAppendOp(ops[2].results[0], ops[1].results[0], layer=0, heads=2))
    ops.append(
        AttentionOp(
            ops[2].results[0], *ops[3].results, heads=2, kv_heads=2, scale=0.5, mask="causal"
        )
    )
    ops.append(RouteOp(ops[4].results[0], router, None, k=2, order="topk_softmax"))
    ops.append(ExpertsOp(ops[4].results[0], *ops[5].results, stack_in, stack_out, act="relu"))
    ops.append(BinaryOp(ops[6].results[0], x, kind="add"))
    ops.append(SliceOp(ops[7].results[0], 1, T + Dim(-1), Dim(1)))
    ops.append(TransposeOp(ops[8].results[0], [2, 1, 0]))
    ops.append(ReshapeOp(ops[9].results[0], [Dim(8)]))
    ops.append(OnnxOp("Clip", [ops[10].results[0], None, bias], {}, [ops[10].results[0].type]))
    block.add_ops([*ops, ReturnOp(ops[11].results[0])])
    func = FuncOp("f", (list(block.arg_types), [ops[11].results[0].type]), Region(block))
    module = ModuleOp([func])
    module.verify()
    text = print_module(module)
    assert print_module(parse_module(text)) == text


def test_it_keeps_masks_of_zeros_in_the_text() -> None:
    levels, sparse = ["dense", "compressed"], 'levels ["dense", "compressed"]'
    encoding = EncodingAttr.make((), levels, [], [0, 2], dynamic=True)
    kind = tensor_type("float32", (T, 8), encoding)
    text = f'#sp.enc<dims ["T"], {sparse}, pos 32, crd 32, masks [0, 2], dynamic>>'
    assert str(kind).endswith(text)


@pytest.mark.parametrize(
    "encoding",
    [
        EncodingAttr.make((), ["dense", "compressed"], order=[1, 0], crd=16),
        EncodingAttr.make((), ["compressed", "singleton"], pos=64),
        EncodingAttr.make((), ["dense", "blocked"], [4, 4], [3]),
        EncodingAttr.make((), ["dense", "structured[2,4]"], crd=8, dynamic=True),
    ],
)
def test_it_reads_every_encoding_back(encoding: EncodingAttr) -> None:
    kind = tensor_type("float32", (16, 8), encoding)
    block = Block(arg_types=[kind])
    block.add_op(ReturnOp(block.args[0]))
    text = print_module(ModuleOp([FuncOp("f", ([kind], [kind]), Region(block))]))
    assert print_module(parse_module(text)) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncodingAttr.make((), ["dense", "dense"], order=[0, 0]), "not a permutation"),
        (lambda: EncodingAttr.make((), ["dense"], order=[0, 1]), "not a permutation"),
        (lambda: EncodingAttr.make((), ["dense", "blocked"]), "need each other"),
        (lambda: EncodingAttr.make((), ["dense", "compressed"], [4, 4]), "need each other"),
        (lambda: EncodingAttr.make((), ["dense", "blocked"], [4]), "does not fit 2 levels"),
        (lambda: EncodingAttr.make((), ["dense", "structured[5,4]"]), "more than there are"),
        (lambda: EncodingAttr.make((), ["singleton"]), "follows a compressed"),
        (lambda: EncodingAttr.make((), ["compressed"], crd=12), "crd 12 is not one of"),
        (lambda: EncodingAttr.make((), ["compressed"], pos=4), "pos 4 is not one of"),
    ],
)
def test_it_refuses_encodings_that_make_no_sense(make, message: str) -> None:
    with pytest.raises(VerifyException, match=message):
        make()


@pytest.mark.parametrize("shape", [(2, 65_537), (2, T)])
def test_it_refuses_sixteen_bit_indices_of_axes_that_may_be_longer(shape) -> None:
    levels = ["dense", "compressed"]
    with pytest.raises(VerifyException, match="16-bit coordinates cannot index"):
        tensor_type("float32", shape, EncodingAttr.make((), levels, crd=16))
    tensor_type("float32", (2, 65_536), EncodingAttr.make((), levels, crd=16))
    tensor_type("float32", shape, EncodingAttr.make((), levels, crd=32))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReshapeOp(value(2, T), [T, Dim(3)]), "element counts differ"),
        (lambda: ExpandOp(value(3, 1), [Dim(4), Dim(5)]), "cannot become"),
        (lambda: SliceOp(value(1, T, 4), 1, T, Dim(1)), "leaves its operand"),
        (lambda: SliceOp(value(4), 0, Dim(2), Dim(3)), "leaves its operand"),
        (lambda: ConcatOp([value(2, 3), value(2, 4)], 0), "another axis differs"),
        (lambda: LinearOp(value(1, 8), value(4, 7)), "weight does not fit x"),
        (lambda: LinearOp(value(1, 8), value(4, 8), act="gelu"), "unknown act"),
        (lambda: LinearOp(value(1, 8), value(4, 8), value(5)), "bias must be"),
        (lambda: NormOp(value(1, 8), value(7), None, kind="rms", eps=0.0), "gamma must be"),
        (lambda: RopeOp(value(1, 8), value(1), value(3), heads=2), "columns are not"),
        (lambda: RouteOp(value(T, 8), value(3, 8), None, k=4, order="topk_softmax"), "k exceeds"),
        (lambda: RouteOp(value(T, 8), value(3, 8), None, k=2, order="best"), "unknown order"),
        (
            lambda: ExpertsOp(
                value(T, 8), value(T, 2), value(T, 2), value(3, 4, 8), value(3, 8, 5), act="relu"
            ),
            "do not chain",
        ),
        (
            lambda: AttentionOp(
                value(T, 8), value(T, 8), value(T, 8), heads=3, kv_heads=3, scale=1.0, mask="none"
            ),
            "divide into heads",
        ),
        (lambda: PruneOp(value(4, 8), value(4, 1), k=5, score_offset=0), "k exceeds"),
        (lambda: PruneOp(value(4, 8), value(4, 1), k=2, score_offset=1), "too few"),
        (lambda: SpliceOp(value(1, 4, 8), value(1, 5, dtype="int64")), "counts differ"),
    ],
)
def test_it_refuses_operations_that_make_no_sense(make, message: str) -> None:
    with pytest.raises(VerifyException, match=message):
        make().verify()


def test_it_refuses_a_wrong_transpose() -> None:
    op = TransposeOp(value(2, 3), [1, 0])
    op.properties["perm"] = TransposeOp(value(2, 3, 4), [0, 1, 2]).properties["perm"]
    with pytest.raises(VerifyException, match="not a permutation"):
        op.verify()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("builtin.module {", ParseError),
        ('builtin.module { %0 = "sp.nothing"() : () -> f32 }', ParseError),
        (
            'builtin.module { func.func @f(%0: tensor<?xf32, #sp.enc<dims ["T*T"]>>) '
            "{ func.return } }",
            VerifyException,
        ),
    ],
)
def test_it_refuses_text_that_is_not_ours(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_module(text)


def test_it_refuses_unknown_level_types_and_masks_of_dense_tensors() -> None:
    with pytest.raises(VerifyException, match="unknown level"):
        EncodingAttr.make((), ["squeezed"])
    with pytest.raises(VerifyException, match="masks of a dense"):
        EncodingAttr.make(("T",), (), (), [1])
