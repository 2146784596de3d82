"""The decoder of `benchmarks.decode` in llama.cpp: a GGUF file written here, run by `llama_decode`.

Architecture `llama` with experts (Mixtral's form), no vocabulary. Every matrix is of one 4-bit type
that llama.cpp repacks while loading, which is its fastest form on processors; its bytes are drawn,
with scales that keep deviations at 1 / sqrt(columns). Files are not mapped, so that weights get
huge pages. Each context has a pool of threads that hardly polls.
"""

import ctypes
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.decode_graph import EPSILON, ROPE_BASE, Shape
from benchmarks.peers_ggml import thread_pool

BLOCKS: Final = {"Q4_0": (32, 18, (0,)), "Q4_K": (256, 144, (0, 2))}
"""Elements and bytes of a block, and where its f16 numbers stand: the scale, and for Q4_K that of
the minima."""
CODE_DEVIATION: Final = 4.6
K_SCALE: Final = 32.0
"""About the deviation of the 6-bit scales times codes of Q4_K over that of the codes."""


def write_gguf(shape: Shape, kind: str, path: Path) -> None:
    """Write the decoder with random weights of one type.

    Args:
        kind: One of `BLOCKS`.
    """
    gguf = import_module("gguf")
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    type_code = gguf.GGMLQuantizationType[kind]
    for name, sizes, packed in _tensors(shape):
        if packed:
            writer.add_tensor(name, _blocks(random, kind, sizes), raw_dtype=type_code)
        else:
            spread = random.standard_normal(sizes, np.float32) * np.float32(sizes[-1] ** -0.5)
            norm = np.ones(sizes, np.float32)
            writer.add_tensor(name, norm if len(sizes) == 1 else spread)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(shape: Shape) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return name, sizes and whether it is packed, of every tensor."""
    width, kv, hidden, experts = shape.width, shape.kv_width, shape.hidden, shape.experts
    listed: list[tuple[str, tuple[int, ...], bool]] = [
        ("token_embd.weight", (shape.vocabulary, width), False),
        ("output_norm.weight", (width,), False),
        ("output.weight", (shape.vocabulary, width), True),
    ]
    for layer in range(shape.layers):
        own: tuple[tuple[str, tuple[int, ...], bool], ...] = (
            ("attn_norm", (width,), False),
            ("attn_q", (width, width), True),
            ("attn_k", (kv, width), True),
            ("attn_v", (kv, width), True),
            ("attn_output", (width, width), True),
            ("ffn_norm", (width,), False),
            ("ffn_gate_inp", (experts, width), False),
            ("ffn_gate_exps", (experts, hidden, width), True),
            ("ffn_up_exps", (experts, hidden, width), True),
            ("ffn_down_exps", (experts, width, hidden), True),
        )
        listed += [(f"blk.{layer}.{name}.weight", sizes, packed) for name, sizes, packed in own]
    return listed


def _blocks(random: np.random.Generator, kind: str, sizes: tuple[int, ...]) -> np.ndarray:
    """Return random bytes of a matrix, its f16 numbers set."""
    elements, size, places = BLOCKS[kind]
    cols = sizes[-1]
    count = cols // elements
    data = random.integers(0, 256, (*sizes[:-1], count, size), np.uint8)
    step = cols**-0.5 / CODE_DEVIATION / (1.0 if kind == "Q4_0" else K_SCALE)
    for at, scale in zip(places, (step, step * 7.5), strict=False):
        data[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return data.reshape(*sizes[:-1], count * size)


class GgufDecoder:
    """A model and one context. One token or one prompt per call."""

    def __init__(self, shape: Shape, path: Path, threads: int) -> None:
        """Load a file of `write_gguf`.

        Raises:
            RuntimeError: llama.cpp refuses it.
        """
        self._llama: Any = import_module("llama_cpp")
        self._shape = shape
        self._model = _model(self._llama, path)
        params = self._llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = shape.context
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._context = self._llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {path.name}")
        pool = thread_pool(threads)
        _attach(self._llama, self._context, pool)
        self._memory = self._llama.llama_get_memory(self._context)

    def forget(self) -> None:
        """Empty the cache."""
        self._llama.llama_memory_clear(self._memory, False)

    def step(self, ids: list[int]) -> int:
        """Append tokens; return the greedy next one.

        Raises:
            RuntimeError: llama.cpp fails.
        """
        llama = self._llama
        tokens = (llama.llama_token * len(ids))(*ids)  # the batch only points at them
        batch = llama.llama_batch_get_one(tokens, len(ids))
        if llama.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        logits = llama.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._shape.vocabulary,)).argmax())


_silent: list[object] = []


def _model(llama: Any, path: Path) -> object:  # noqa: ANN401
    if not _silent:
        _silent.append(llama.llama_log_callback(lambda _level, _text, _data: None))
        llama.llama_log_set(_silent[0], None)
        llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp does not load {path.name}")
    return model


def _attach(llama: Any, context: object, pool: int) -> None:  # noqa: ANN401
    """Give a context its pool; the Python package has no function for that."""
    library = ctypes.CDLL(str(Path(llama.__file__).parent / "lib" / "libllama.so"))
    library.llama_attach_threadpool.argtypes = (ctypes.c_void_p,) * 3
    library.llama_attach_threadpool.restype = None
    library.llama_attach_threadpool(context, pool, pool)
