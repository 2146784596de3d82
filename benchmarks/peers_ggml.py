"""The same products in ggml, the library under llama.cpp, as it ships inside llama-cpp-python.

Graphs are built through ggml's C functions. Weights lie in its "repack" buffer where a type has
one, which is its fastest layout on processors. A worker of ggml polls for a long time after a graph
by default and would starve whatever is measured next on two cores, so polling is set to the least.
The structures below are those of the pinned version (requirements-peers.lock).
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

NAME: Final = "ggml"
PACKAGE: Final = "llama-cpp-python"
TYPES: Final = {"Q4_0": 2, "Q4_K": 12}
"""Codes of the 4-bit types that have a repacked layout."""
F32: Final = 0
CPU_DEVICE: Final = 0
WEIGHTS_USAGE: Final = 1
LEAST_POLL: Final = 1
MAX_THREADS: Final = 512
SPARE_TENSORS: Final = 16
NODES_PER_LAYER: Final = 24


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _PoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", c_bool * MAX_THREADS),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


_P: Final = c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ggml_log_set": (None, (_P, _P)),
    "ggml_init": (_P, (_InitParams,)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    "ggml_new_tensor_2d": (_P, (_P, c_int, c_int64, c_int64)),
    "ggml_new_tensor_3d": (_P, (_P, c_int, c_int64, c_int64, c_int64)),
    "ggml_new_graph_custom": (_P, (_P, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_mul_mat_id": (_P, (_P, _P, _P, _P)),
    "ggml_soft_max": (_P, (_P, _P)),
    "ggml_argsort_top_k": (_P, (_P, _P, c_int)),
    "ggml_get_rows": (_P, (_P, _P, _P)),
    "ggml_reshape_2d": (_P, (_P, _P, c_int64, c_int64)),
    "ggml_reshape_3d": (_P, (_P, _P, c_int64, c_int64, c_int64)),
    "ggml_view_2d": (_P, (_P, _P, c_int64, c_int64, c_size_t, c_size_t)),
    "ggml_div": (_P, (_P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_sum_rows": (_P, (_P, _P)),
    "ggml_swiglu_split": (_P, (_P, _P, _P)),
    "ggml_row_size": (c_size_t, (c_int, c_int64)),
    "ggml_quantize_chunk": (
        c_size_t,
        (c_int, POINTER(c_float), _P, c_int64, c_int64, c_int64, _P),
    ),
    "ggml_threadpool_params_init": (None, (POINTER(_PoolParams), c_int)),
    "ggml_threadpool_new": (_P, (POINTER(_PoolParams),)),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, c_int)),
    "ggml_backend_cpu_set_threadpool": (None, (_P, _P)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_dev_by_type": (_P, (c_int,)),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, c_char_p)),
    "ggml_backend_buft_name": (c_char_p, (_P,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_alloc_ctx_tensors": (_P, (_P, _P)),
    "ggml_backend_buffer_set_usage": (None, (_P, c_int)),
    "ggml_backend_tensor_set": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_backend_graph_compute": (c_int, (_P, _P)),
}
_LOG: Final = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_SILENT: Final = _LOG(lambda _level, _text, _data: None)
Run = Callable[[], object]


def version() -> str:
    """Return the version of the package that carries ggml."""
    return metadata.version(PACKAGE)


def _libraries() -> Sequence[ctypes.CDLL]:
    package = import_module("llama_cpp")
    folder = Path(str(package.__file__)).parent / "lib"
    names = ("libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0")  # as libllama loads them
    return [ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in names]


class _Ggml(SimpleNamespace):
    """The functions of `_SIGNATURES`, called by their names without the prefix."""

    def __init__(self) -> None:
        super().__init__()
        libraries = _libraries()
        for name, (result, arguments) in _SIGNATURES.items():
            function = next(getattr(one, name) for one in libraries if hasattr(one, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.log_set(ctypes.cast(_SILENT, _P), None)

    def context(self, tensors: int, graph: int = 0) -> int:
        """Return a context for so many tensors, and a graph of so many nodes."""
        size = tensors * self.tensor_overhead()
        if graph:
            size += self.graph_overhead_custom(graph, False)
        return int(self.init(_InitParams(size, None, True)))

    def backend(self, threads: int) -> int:
        """Return a processor back end whose workers hardly poll."""
        backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(backend, threads)
        self.backend_cpu_set_threadpool(backend, self.pool(threads))
        return int(backend)

    def pool(self, threads: int) -> int:
        """Return a pool of threads that hardly poll."""
        params = _PoolParams()
        self.threadpool_params_init(ctypes.byref(params), threads)
        params.poll = LEAST_POLL
        return int(self.threadpool_new(ctypes.byref(params)))

    def weight_buffers(self) -> int:
        """Return the buffer type of repacked weights.

        Raises:
            RuntimeError: This build has none.
        """
        device = self.backend_dev_by_type(CPU_DEVICE)
        registry = self.backend_dev_backend_reg(device)
        found = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        listed = ctypes.CFUNCTYPE(POINTER(_P), _P)(found)(device) if found else None
        for at in range(MAX_THREADS):
            buffers = listed[at] if listed else None
            if not buffers:
                break
            if b"REPACK" in self.backend_buft_name(buffers):
                return int(buffers)
        raise RuntimeError("this build of ggml has no repacked weights")

    def quantised(self, kind: int, rows: int, cols: int, seed: int) -> np.ndarray:
        """Return bytes of a random matrix (rows, cols) in a type of ggml."""
        size = self.row_size(kind, cols) * rows
        source = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
        to = np.empty(size, np.uint8)
        pointer = source.ctypes.data_as(POINTER(c_float))
        self.quantize_chunk(kind, pointer, to.ctypes.data, 0, rows, cols, None)
        return to

    def fill(self, tensor: int, data: np.ndarray) -> None:
        """Copy bytes into a tensor."""
        self.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)


def thread_pool(threads: int) -> int:
    """Return a pool for a context of llama.cpp, of threads that hardly poll."""
    return _Ggml().pool(threads)


def _place_weights(g: _Ggml, context: int) -> None:
    buffers = g.backend_alloc_ctx_tensors_from_buft(context, g.weight_buffers())
    g.backend_buffer_set_usage(buffers, WEIGHTS_USAGE)


def _run(g: _Ggml, backend: int, graph: int) -> Run:
    return lambda: g.backend_graph_compute(backend, graph)


def product_walk(
    type_name: str, n: int, k: int, count: int, rows: int, threads: int
) -> Callable[[], object]:
    """Return a run of `count` products x (rows, k) -> (rows, n), each matrix in memory of its own.

    Args:
        type_name: One of `TYPES`.
    """
    g, kind = _Ggml(), TYPES[type_name]
    backend, held = g.backend(threads), g.context(count + SPARE_TENSORS)
    weights = [g.new_tensor_2d(held, kind, k, n) for _ in range(count)]
    _place_weights(g, held)
    data = g.quantised(kind, n, k, 1)
    for weight in weights:
        g.fill(weight, data)
    nodes = 2 * count + SPARE_TENSORS
    work = g.context(nodes, nodes)
    x = g.new_tensor_2d(work, F32, k, rows)
    graph = g.new_graph_custom(work, nodes, False)
    for weight in weights:
        g.build_forward_expand(graph, g.mul_mat(work, weight, x))
    g.backend_alloc_ctx_tensors(work, backend)
    g.fill(x, np.random.default_rng(4).standard_normal((rows, k)).astype(np.float32))
    return _run(g, backend, graph)


def moe_walk(
    type_name: str, layers: int, width: int, hidden: int, experts: int, threads: int
) -> Callable[[], object]:
    """Return a run of routed SwiGLU layers over one token, top 2, residual, as in llama.cpp."""
    g, kind = _Ggml(), TYPES[type_name]
    backend, held = g.backend(threads), g.context(3 * layers + SPARE_TENSORS)
    small = g.context(layers + SPARE_TENSORS)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    weights = [
        [g.new_tensor_3d(held, kind, cols, rows, experts) for cols, rows in shapes]
        for _ in range(layers)
    ]
    routers = [g.new_tensor_2d(small, F32, width, experts) for _ in range(layers)]
    _place_weights(g, held)
    g.backend_alloc_ctx_tensors_from_buft(small, g.backend_cpu_buffer_type())
    for at, (cols, rows) in enumerate(shapes):
        data = np.tile(g.quantised(kind, rows, cols, at), experts)
        for layer in weights:
            g.fill(layer[at], data)
    for at, router in enumerate(routers):
        logits = np.random.default_rng(at).standard_normal((experts, width)).astype(np.float32)
        g.fill(router, logits)
    nodes = NODES_PER_LAYER * layers + SPARE_TENSORS
    work = g.context(nodes, nodes)
    source = x = g.new_tensor_2d(work, F32, width, 1)
    for router, layer in zip(routers, weights, strict=True):
        x = _routed_layer(g, work, x, router, layer, width, experts)
    graph = g.new_graph_custom(work, nodes, False)
    g.build_forward_expand(graph, x)
    g.backend_alloc_ctx_tensors(work, backend)
    g.fill(source, np.random.default_rng(4).standard_normal((1, width)).astype(np.float32))
    return _run(g, backend, graph)


def _routed_layer(
    g: _Ggml, c: int, x: int, router: int, layer: Sequence[int], width: int, experts: int
) -> int:
    gate, up, down = layer
    shares = g.soft_max(c, g.mul_mat(c, router, x))
    chosen = g.argsort_top_k(c, shares, 2)
    taken = g.get_rows(c, g.reshape_3d(c, shares, 1, experts, 1), chosen)
    taken = g.reshape_2d(c, taken, 2, 1)
    taken = g.reshape_3d(c, g.div(c, taken, g.sum_rows(c, taken)), 1, 2, 1)
    token = g.reshape_3d(c, x, width, 1, 1)
    wide = g.swiglu_split(
        c, g.mul_mat_id(c, gate, token, chosen), g.mul_mat_id(c, up, token, chosen)
    )
    out = g.mul(c, g.mul_mat_id(c, down, wide, chosen), taken)
    row = 4 * width
    parts = [g.view_2d(c, out, width, 1, 2 * row, row * at) for at in range(2)]
    return int(g.add(c, g.add(c, *parts), x))
