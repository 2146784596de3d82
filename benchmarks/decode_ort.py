"""The decoder of `benchmarks.decode` in ONNX Runtime, at its best.

Everything is bound once: token ids, lengths, the next token, and per layer one buffer that is past
and present at once, so that no run copies the cache. Queries, keys and values are one packed
product, activations are int8 (accuracy level 4), the block of the codes is the caller's choice.
"""

from typing import Final

import numpy as np
import onnxruntime

from benchmarks.decode_graph import Shape, cache_name, runtime_model

VERSION: Final = onnxruntime.__version__


class RuntimeDecoder:
    """A session and its cache. One token or one prompt per call."""

    def __init__(self, shape: Shape, block: int, threads: int) -> None:
        """Make the graph and load it; `block` as in `runtime_model`."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")
        model, outside = runtime_model(shape, block)
        values = [_value(array) for array in outside.values()]  # a session copies them
        options.add_external_initializers(list(outside), values)
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        size = (1, shape.kv_heads, shape.context, shape.head_dim)
        names = [(at, part) for at in range(shape.layers) for part in ("key", "value")]
        self._caches = {name: _value(np.zeros(size, np.float32)) for name in names}
        self._last = _value(np.zeros(1, np.int32))
        self._total = _value(np.zeros((), np.int32))
        self._token = _value(np.zeros((1, 1), np.int64))
        self._bindings: dict[int, tuple[onnxruntime.IOBinding, onnxruntime.OrtValue]] = {}
        self._length = 0

    def forget(self) -> None:
        """Empty the cache."""
        self._length = 0

    def step(self, ids: list[int]) -> int:
        """Append tokens; return the greedy next one."""
        rows = len(ids)
        if rows not in self._bindings:
            self._bindings[rows] = self._bound(rows)
        binding, tokens = self._bindings[rows]
        tokens.update_inplace(np.array([ids], np.int64))
        self._length += rows
        self._last.update_inplace(np.array([self._length - 1], np.int32))
        self._total.update_inplace(np.array(self._length, np.int32))
        self._session.run_with_iobinding(binding)
        return int(self._token.numpy()[0, 0])

    def _bound(self, rows: int) -> tuple[onnxruntime.IOBinding, onnxruntime.OrtValue]:
        binding = self._session.io_binding()
        tokens = _value(np.zeros((1, rows), np.int64))
        binding.bind_ortvalue_input("token_ids", tokens)
        binding.bind_ortvalue_input("last", self._last)
        binding.bind_ortvalue_input("total", self._total)
        binding.bind_ortvalue_output("token", self._token)
        for name, cache in self._caches.items():
            binding.bind_ortvalue_input(cache_name("past", *name), cache)
            binding.bind_ortvalue_output(cache_name("present", *name), cache)
        return binding, tokens


def _value(array: np.ndarray) -> onnxruntime.OrtValue:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
