"""Which peers run what a benchmark measures, each at its fastest settings.

Their packages are pinned in requirements-peers.lock, which `make peers` installs; ggml is built
from source for this processor, which takes a few minutes and a C++ compiler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from benchmarks import peers, peers_ggml, peers_openvino

ORT_BLOCKS: Final = (32, 128)
OPENVINO_BLOCKS: Final = (32, 128)
NEEDED: Final = {"llama_cpp": peers_ggml.PACKAGE, "openvino": "openvino", "gguf": "gguf"}
Run = Callable[[], object]


@dataclass(frozen=True)
class Peer:
    """One way of one peer to do the work.

    Attributes:
        label: Its name and setting.
        version: Of its package.
        start: Builds it and returns its run.
    """

    label: str
    version: str
    start: Callable[[], Run]


def require() -> None:
    """Stop with a hint unless every peer is installed.

    Raises:
        SystemExit: One is missing.
    """
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise SystemExit(f"error: not installed: {', '.join(missing)}\nhint: run `make peers` once")


def nbits(n: int, k: int, count: int, rows: int, threads: int) -> list[Peer]:
    """Return products of 4-bit weights in ONNX Runtime."""
    return [
        Peer(
            f"onnxruntime MatMulNBits block {block}",
            peers.VERSION,
            lambda block=block: peers.nbits_walk(n, k, count, block, rows, threads),
        )
        for block in ORT_BLOCKS
    ]


def ggml_products(n: int, k: int, count: int, rows: int, threads: int) -> list[Peer]:
    """Return products of 4-bit weights in ggml."""
    return [
        Peer(
            f"ggml {kind} repacked",
            peers_ggml.version(),
            lambda kind=kind: peers_ggml.product_walk(kind, n, k, count, rows, threads),
        )
        for kind in peers_ggml.TYPES
    ]


def openvino_products(n: int, k: int, count: int, rows: int, threads: int) -> list[Peer]:
    """Return products of 4-bit weights in OpenVINO."""
    return [
        Peer(
            f"openvino u4 group {block}",
            peers_openvino.version(),
            lambda block=block: peers_openvino.u4_walk(n, k, count, block, rows, threads),
        )
        for block in OPENVINO_BLOCKS
    ]


def int8_products(n: int, k: int, count: int, rows: int, threads: int) -> list[Peer]:
    """Return products of 8-bit weights and activations in each peer that has them."""
    return [
        Peer(
            "onnxruntime MatMulInteger",
            peers.VERSION,
            lambda: peers.int8_walk(n, k, count, rows, threads),
        ),
        Peer(
            "openvino i8",
            peers_openvino.version(),
            lambda: peers_openvino.i8_walk(n, k, count, rows, threads),
        ),
    ]


def routed_layers(layers: int, width: int, hidden: int, experts: int, threads: int) -> list[Peer]:
    """Return layers of routed SwiGLU experts, top 2, over one token."""
    return [
        *(
            Peer(
                f"onnxruntime QMoE block {block}",
                peers.VERSION,
                lambda block=block: peers.qmoe_walk(layers, width, hidden, experts, block, threads),
            )
            for block in ORT_BLOCKS
        ),
        *(
            Peer(
                f"ggml {kind} mul_mat_id",
                peers_ggml.version(),
                lambda kind=kind: peers_ggml.moe_walk(
                    kind, layers, width, hidden, experts, threads
                ),
            )
            for kind in peers_ggml.TYPES
        ),
    ]
