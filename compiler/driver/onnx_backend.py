"""ONNX Runtime over the files of a submission, as a back end: what the model said before us.

    submission directory -> one session per component -> see, step | forward

It computes in f32 with the submission's own weights, so its answers are close to those of a bundle
and not the same bits. For comparing, and for running what has not been compiled. ONNX Runtime is
optional: without it `init` says how to get it. `OnnxFiles` is the model alone, as arrays.
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.backend import Backend, BackendAbsentError, BackendError
from compiler.contract.pipeline import SEE, Port, ProgramSpec
from compiler.contract.session import FORWARD, STEP, Buffer
from compiler.frontend.pipeline_json import read_pipeline
from compiler.passes.pipeline_spec import FAMILY_GRAPH, ImageSpec, PipelineSpec

Array = NDArray[Any]
MASKED: Final = -1e9
_KINDS: Final[Mapping[str, Any]] = {
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
_HELD: Final[Mapping[str, Any]] = {"f32": np.dtype("<f4"), "i32": np.dtype("<i4")}


def onnx_runtime() -> ModuleType:
    """Return ONNX Runtime.

    Raises:
        BackendAbsentError: It is not installed.
    """
    try:
        import onnxruntime  # optional, and costs 0.1 s
    except ImportError as error:
        raise BackendAbsentError(
            f"ONNX Runtime is not here: {error}", hint="pip install onnxruntime"
        ) from error
    found: ModuleType = onnxruntime
    return found


class OnnxFiles:
    """The components of a submission, each in a session, and a cache that grows."""

    def __init__(self, directory: Path, threads: int = 1) -> None:
        """Open every component.

        Raises:
            BackendAbsentError: ONNX Runtime is not installed.
            BackendError: It refuses a file.
            CompilerError: There is no submission in the directory.
        """
        runtime = onnx_runtime()
        self.spec: Final[PipelineSpec] = read_pipeline(directory)
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        try:
            self.sessions: dict[str, Any] = {
                part.name: runtime.InferenceSession(
                    directory / part.file, options, providers=["CPUExecutionProvider"]
                )
                for part in self.spec.components
            }
        except Exception as error:  # the runtime's errors have no common root of their own
            raise BackendError(f"ONNX Runtime refuses the model: {error}") from error
        self.cache: tuple[Array, Array] | None = None

    @property
    def rows(self) -> int:
        """Rows in the cache."""
        return 0 if self.cache is None else int(self.cache[0].shape[3])

    def keep(self, rows: int) -> None:
        """Forget every row from `rows` on."""
        if self.cache is not None:
            keys, values = self.cache
            self.cache = (keys[:, :, :, :rows], values[:, :, :, :rows]) if rows else None

    def see(self, pixels: Array) -> tuple[Array, Array]:
        """Show a picture, (height, width) or (height, width, channels) u8.

        Returns:
            Its tokens, (n, width) f32, which are then all that the cache holds, and their
            positions, (n,).
        """
        image = self.spec.image
        assert image is not None
        ports = self._ports("vision")
        scaled = pixels.reshape(image.height, image.width, image.channels).astype(np.float32)
        planes = (scaled / image.divide - image.subtract).transpose(2, 0, 1)[None]
        names = [ports[role] for role in ("embeds", "positions") if role in ports]
        feeds = {ports["image"]: planes.astype(np.float32), **self._constants("vision")}
        tokens, *positions = self.sessions["vision"].run(names, feeds)
        kept = positions[0] if positions else np.arange(tokens.shape[1])[None]
        self.cache = None
        self.decode(tokens, kept, ())
        return tokens[0], kept[0]

    def step(
        self, ids: Array, positions: Array, others: tuple[str, ...] = ("routing",)
    ) -> tuple[Array, ...]:
        """Feed tokens, (T,); return the last row's logits and, of other outputs, its part."""
        ports = self._ports("embed")
        (embeds,) = self.sessions["embed"].run([ports["embeds"]], {ports["token_ids"]: ids[None]})
        logits, *more = self.decode(embeds, positions[None], others)
        return logits[0, -1], *(found[:, -1] for found in more)

    def decode(self, embeds: Array, positions: Array, others: tuple[str, ...]) -> list[Array]:
        """Run the decoder over (1, T, width) behind the cache; return logits and `others`.

        Raises:
            BackendError: Its cache is not one tensor of keys and one of values.
        """
        ports, decoder = self._ports("decoder"), self.sessions["decoder"]
        inputs = [port.role for port in self.spec.component("decoder").inputs]
        if inputs.count("past_key") != 1 or "positions" not in ports or "causal_mask" not in ports:
            raise BackendError(
                "this decoder keeps its cache in another form",
                hint="supported: one past_key, one past_value, positions and a causal mask",
            )
        shape = next(i.shape for i in decoder.get_inputs() if i.name == ports["past_key"])
        empty = np.zeros((shape[0], 1, shape[2], 0, shape[4]), np.float32)
        keys, values = self.cache or (empty, empty)
        rows, past = embeds.shape[1], keys.shape[3]
        mask = np.triu(np.full((rows, past + rows), MASKED, np.float32), past + 1)[None, None]
        feeds = {
            ports["embeds"]: embeds,
            ports["positions"]: positions,
            ports["causal_mask"]: mask,
            ports["past_key"]: keys,
            ports["past_value"]: values,
            **self._constants("decoder"),
        }
        names = [ports[r] for r in ("logits", "present_key", "present_value", *others)]
        logits, keys, values, *more = decoder.run(names, feeds)
        self.cache = (keys, values)
        return [logits, *more]

    def _ports(self, component: str) -> dict[str, str]:
        found = self.spec.component(component)
        return {port.role: port.name for port in (*found.inputs, *found.outputs)}

    def _constants(self, component: str) -> dict[str, Array]:
        ports = self.spec.component(component).inputs
        kinds = {i.name: _KINDS[i.type] for i in self.sessions[component].get_inputs()}
        return {p.name: np.array(p.value, kinds[p.name]) for p in ports if p.role == "constant"}

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a model of family `graph`: arrays by role, of any shape with as many elements."""
        model, session = self.spec.component("model"), self.sessions["model"]
        names = {port.role: port.name for port in model.inputs if port.role in inputs}
        infos = {info.name: info for info in session.get_inputs()}
        feeds = self._constants("model")
        for role, name in names.items():
            shape = [side if isinstance(side, int) else -1 for side in infos[name].shape]
            feeds[name] = inputs[role].astype(_KINDS[infos[name].type]).reshape(shape)
        made = session.run([port.name for port in model.outputs], feeds)
        return {port.role: found for port, found in zip(model.outputs, made, strict=True)}


class OnnxBackend(Backend):
    """Runs a submission's files."""

    name: ClassVar[str] = "onnxruntime"

    def __init__(self, directory: Path, *, threads: int = 1) -> None:
        """Load nothing yet.

        Args:
            directory: A submission: `pipeline.json` and the files it names.
            threads: Threads of a run.
        """
        super().__init__()
        self._directory, self._threads = directory, threads
        self._files: OnnxFiles | None = None

    @property
    def files(self) -> OnnxFiles:
        """The model behind it.

        Raises:
            BackendError: It is not initialised.
        """
        if self._files is None:
            raise BackendError(f"the {self.name} back end is not initialised", hint="call init")
        return self._files

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache."""
        return 0 if self._files is None else self._files.rows

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        if not 0 <= length <= self.kv_length:
            raise BackendError(f"cannot set the cache to {length} rows")
        self.files.keep(length)

    def _load(self) -> Mapping[str, ProgramSpec]:
        self._files = OnnxFiles(self._directory, self._threads)
        spec = self._files.spec
        if spec.family == FAMILY_GRAPH:
            return {FORWARD: _forward_ports(self._files)}
        vocabulary = len(spec.tokens.vocabulary) if spec.tokens is not None else 1
        row = Port(spec.max_step_tokens, 1, "i32", dynamic=True)
        token, logits = Port(1, 1, "i32", dynamic=False), Port(1, vocabulary, "f32", dynamic=False)
        step = ProgramSpec({"token_ids": row, "positions": row}, {"token": token, "logits": logits})
        return {STEP: step} if spec.image is None else {SEE: _see_ports(spec.image), STEP: step}

    def _execute(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        runs = {SEE: self._see, STEP: self._step, FORWARD: self._forward}
        try:
            return {role: _raw(made) for role, made in runs[program](inputs).items()}
        except BackendError:
            raise
        except Exception as error:  # the runtime's errors have no common root of their own
            raise BackendError(f"ONNX Runtime failed in {program!r}: {error}") from error

    def _see(self, inputs: Mapping[str, Buffer]) -> dict[str, Array]:
        self.files.see(np.frombuffer(inputs["image"], np.uint8))
        return {}

    def _step(self, inputs: Mapping[str, Buffer]) -> dict[str, Array]:
        ids, positions = (
            np.frombuffer(inputs[role], "<i4").astype(np.int64)
            for role in ("token_ids", "positions")
        )
        (logits,) = self.files.step(ids, positions, ())
        return {"token": np.array([logits.argmax()]), "logits": logits}

    def _forward(self, inputs: Mapping[str, Buffer]) -> dict[str, Array]:
        ports = self._programs[FORWARD].inputs
        arrays = {r: np.frombuffer(inputs[r], _HELD[port.dtype]) for r, port in ports.items()}
        return self.files.forward(arrays)

    def _unload(self) -> None:
        self._files = None


def _see_ports(image: ImageSpec) -> ProgramSpec:
    return ProgramSpec({"image": Port(1, image.size.size_bytes, "u8", dynamic=False)}, {})


def _forward_ports(files: OnnxFiles) -> ProgramSpec:
    model, session = files.spec.component("model"), files.sessions["model"]
    infos = {info.name: info for info in (*session.get_inputs(), *session.get_outputs())}
    most = files.spec.max_step_tokens
    inputs = {p.role: _port(infos[p.name], most) for p in model.inputs if p.role != "constant"}
    return ProgramSpec(inputs, {p.role: _port(infos[p.name], most) for p in model.outputs})


def _port(info: Any, most: int) -> Port:  # noqa: ANN401 -- ONNX Runtime has no types
    sides = [side for side in info.shape if isinstance(side, int)]
    is_dynamic = len(sides) < len(info.shape)
    cols = sides[-1] if sides else 1
    rows = int(np.prod(sides[:-1], dtype=np.int64)) if sides else 1
    kind = "f32" if _KINDS.get(info.type) is np.float32 else "i32"
    if is_dynamic:
        return Port(most, rows * cols, kind, dynamic=True)
    return Port(rows, cols, kind, dynamic=False)


def _raw(array: Array) -> memoryview:
    kind = "<f4" if array.dtype.kind == "f" else "<i4"
    return memoryview(np.ascontiguousarray(array, kind).tobytes())
