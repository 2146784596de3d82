"""Our stored products in the text of upstream MLIR: `sparse_tensor` and `linalg`.

Upstream's `--sparsifier` is a compiler of sparse programs that is not ours: what it computes for an
encoding is a second opinion on what the encoding means. Tests compile and run the text with
`mlir-opt` and `mlir-runner`; the product never calls them. Level types map one to one; a block
becomes `floordiv` and `mod`, as does `structured[n,m]`. Coordinate widths that upstream does not
know are refused by our own verifier already.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.dialects.encoding import EncodingAttr, structured

_AXES: Final = ("d0", "d1")


def upstream_encoding(encoding: EncodingAttr) -> str:
    """Return `#sparse_tensor.encoding<...>` of an encoding of a matrix.

    Raises:
        ValueError: The encoding is not one of a matrix.
    """
    if len(encoding.level_names) != len(_AXES):
        raise ValueError("only encodings of matrices are written for upstream")
    levels = _levels(encoding)
    widths = f"posWidth = {encoding.pos.data}, crdWidth = {encoding.crd.data}"
    return f"#sparse_tensor.encoding<{{ map = (d0, d1) -> ({', '.join(levels)}), {widths} }}>"


def upstream_matmul(encoding: EncodingAttr, a: NDArray[np.float32], b: NDArray[np.float32]) -> str:
    """Return a module whose `main` prints the bits of `a @ b` as 32-bit integers, row by row.

    Args:
        encoding: How `a` is stored.
        a: (M, K) f32; zeros wherever the encoding keeps nothing.
        b: (K, N) f32.
    """
    (m, k), n = a.shape, b.shape[1]
    sparse, vector = f"tensor<{m}x{k}xf32, #S>", f"vector<{m * n}xf32>"
    bits = vector.replace("f32", "i32")
    return f"""#S = {upstream_encoding(encoding)}
func.func @main() {{
  %a = arith.constant {_constant(a)} : tensor<{m}x{k}xf32>
  %b = arith.constant {_constant(b)} : tensor<{k}x{n}xf32>
  %s = sparse_tensor.convert %a : tensor<{m}x{k}xf32> to {sparse}
  %z = arith.constant dense<0.0> : tensor<{m}x{n}xf32>
  %y = linalg.matmul ins(%s, %b : {sparse}, tensor<{k}x{n}xf32>)
         outs(%z : tensor<{m}x{n}xf32>) -> tensor<{m}x{n}xf32>
  %i = arith.constant 0 : index
  %f = arith.constant 0.0 : f32
  %v = vector.transfer_read %y[%i, %i], %f : tensor<{m}x{n}xf32>, vector<{m}x{n}xf32>
  %w = vector.shape_cast %v : vector<{m}x{n}xf32> to {vector}
  %x = vector.bitcast %w : {vector} to {bits}
  vector.print %x : {bits}
  return
}}
"""


def _levels(encoding: EncodingAttr) -> list[str]:
    names, blocks = encoding.level_names, [size.data for size in encoding.block.data]
    axes = [_AXES[axis.data] for axis in encoding.order.data]
    if blocks:
        outer = [
            f"{axis} floordiv {size} : {'compressed' if name == 'blocked' else name}"
            for axis, size, name in zip(axes, blocks, names, strict=True)
        ]
        return outer + [
            f"{axis} mod {size} : dense" for axis, size in zip(axes, blocks, strict=True)
        ]
    found = []
    for at, (axis, name) in enumerate(zip(axes, names, strict=True)):
        pair = structured(name)
        if pair is not None:
            found.append(f"{axis} floordiv {pair[1]} : dense")
            found.append(f"{axis} mod {pair[1]} : structured[{pair[0]}, {pair[1]}]")
        elif name == "compressed" and names[at + 1 : at + 2] == ("singleton",):
            found.append(f"{axis} : compressed(nonunique)")
        else:
            found.append(f"{axis} : {name}")
    return found


def _constant(array: NDArray[np.float32]) -> str:
    return "dense<" + str([[float(f"{v:.9g}") for v in row] for row in array.tolist()]) + ">"
