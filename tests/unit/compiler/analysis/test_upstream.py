"""Upstream MLIR agrees: it takes our text, and its sparse compiler computes what ours means."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.utils.exceptions import VerifyException

from compiler.analysis.constants import ConstantTable
from compiler.analysis.reference import Execution
from compiler.dialects.dims import Dim
from compiler.dialects.encoding import EncodingAttr
from compiler.dialects.sp_convert import AwaitOp, FromDenseOp, MatmulOp, PackOp, ToDenseOp
from compiler.dialects.text import parse_module, print_module
from compiler.dialects.types import tensor_type
from compiler.dialects.upstream import upstream_encoding, upstream_matmul
from tests.golden.passes.cases import golden_path

OPT, RUNNER = shutil.which("mlir-opt-22"), shutil.which("mlir-runner-22")
LIBRARY = Path("/usr/lib/llvm-22/lib/libmlir_c_runner_utils.so.22.1")
needs_mlir = pytest.mark.skipif(
    OPT is None or RUNNER is None or not LIBRARY.is_file(),
    reason="mlir-opt-22 and mlir-runner-22 are not installed (Debian: mlir-22-tools)",
)
ROWS, DEPTH, COLUMNS = 8, 16, 4


def random_sparse(name: str) -> np.ndarray:
    rng = np.random.default_rng(11)
    a = rng.standard_normal((ROWS, DEPTH)).astype(np.float32)
    if name == "2:4":
        groups = a.reshape(-1, 4)
        np.put_along_axis(groups, np.argsort(-np.abs(groups), axis=1)[:, 2:], 0, axis=1)
    elif name == "BSR":
        a[:4, 4:8] = a[4:, 8:] = 0
    else:
        a[rng.random(a.shape) < 0.7] = 0
    return a


ENCODINGS = {
    "CSR": EncodingAttr.make((), ["dense", "compressed"], crd=16),
    "CSC": EncodingAttr.make((), ["dense", "compressed"], order=[1, 0], crd=16),
    "COO": EncodingAttr.make((), ["compressed", "singleton"]),
    "BSR": EncodingAttr.make((), ["dense", "blocked"], [4, 4]),
    "2:4": EncodingAttr.make((), ["dense", "structured[2,4]"], crd=8),
}


def tool(*command: str, text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:2000]
    return done.stdout


def product(encoding: EncodingAttr) -> tuple[ModuleOp, FuncOp]:
    """Our program: store a, multiply."""
    kinds = [tensor_type("float32", shape) for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS))]
    block = Block(arg_types=kinds)
    stored = FromDenseOp(block.args[0], encoding)
    matmul = MatmulOp(stored.result, block.args[1])
    block.add_ops([stored, matmul, ReturnOp(matmul.result)])
    func = FuncOp("f", (kinds, [matmul.result.type]), Region(block))
    return ModuleOp([func]), func


@needs_mlir
@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_upstream_computes_what_our_encoding_means(name: str) -> None:
    a = random_sparse(name)
    b = np.random.default_rng(12).standard_normal((DEPTH, COLUMNS)).astype(np.float32)
    lowered = tool(str(OPT), "--sparsifier", text=upstream_matmul(ENCODINGS[name], a, b))
    shared = f"--shared-libs={LIBRARY}"
    printed = tool(str(RUNNER), "-e", "main", "--entry-point-result=void", shared, text=lowered)
    numbers = [int(n) for n in printed.strip().strip("()").split(",")]
    found = np.array(numbers, np.int64).astype(np.int32).view(np.float32).reshape(ROWS, COLUMNS)
    module, func = product(ENCODINGS[name])
    module.verify()
    ours = Execution(ConstantTable(), {}).run(func, [a, b])[func.body.block.last_op.operands[0]]
    assert np.abs(found - ours).max() <= 1e-6


@needs_mlir
@pytest.mark.parametrize("name", ["propagate-masks", "derive-structure", "last-row"])
def test_upstream_reads_our_text(name: str) -> None:
    for text in golden_path(name).read_text().split("// -----\n"):
        assert "sp.enc" in tool(str(OPT), "--allow-unregistered-dialect", text=text)


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_stored_programs_read_back(name: str) -> None:
    text = print_module(product(ENCODINGS[name])[0])
    assert print_module(parse_module(text)) == text


def test_levels_are_written_as_upstream_names_them() -> None:
    assert "d0 floordiv 4 : dense, d1 floordiv 4 : compressed, d0 mod 4 : dense" in (
        upstream_encoding(ENCODINGS["BSR"])
    )
    assert "d1 mod 4 : structured[2, 4]" in upstream_encoding(ENCODINGS["2:4"])
    assert "(d1 : dense, d0 : compressed), posWidth = 32, crdWidth = 16" in (
        upstream_encoding(ENCODINGS["CSC"])
    )
    with pytest.raises(ValueError, match="matrices"):
        upstream_encoding(EncodingAttr.make((), ["compressed"]))


def value(
    shape: tuple[int, ...], encoding: EncodingAttr | None = None, dtype="float32"
) -> SSAValue:
    return Block(arg_types=[tensor_type(dtype, [Dim(s) for s in shape], encoding)]).args[0]


def test_packing_takes_its_buffers_as_operands() -> None:
    csr = ENCODINGS["CSR"]
    meta = [value((9,), dtype="int32"), value((30,), dtype="int32")]
    op = PackOp(value((30,)), meta, tensor_type("float32", (ROWS, DEPTH), csr))
    op.verify()
    waiting = AwaitOp(op.result, op.ready)
    waiting.verify()
    ToDenseOp(waiting.result).verify()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: MatmulOp(value((8, 16)), value((16, 4))), "convert it with sp.from_dense"),
        (lambda c: MatmulOp(value((8, 16), c), value((16, 4), c)), "use sp.to_dense"),
        (lambda c: MatmulOp(value((8, 16), c), value((15, 4))), "do not chain"),
        (lambda c: FromDenseOp(value((8, 16), c), c), "stored already"),
        (lambda c: ToDenseOp(value((8, 16))), "dense already"),
        (lambda c: AwaitOp(value((8, 16)), value((1,), dtype="int32")), "no metadata"),
        (
            lambda c: PackOp(value((9,)), [], tensor_type("float32", (8, 16), c)),
            "0 buffers, levels need 2",
        ),
        (
            lambda c: PackOp(value((9,)), [value((9,))] * 2, tensor_type("float32", (8, 16), c)),
            "not integers",
        ),
    ],
)
def test_dense_boundaries_need_a_conversion(make, message: str) -> None:
    with pytest.raises(VerifyException, match=message):
        make(ENCODINGS["CSR"]).verify()
