"""Lowered modules for tests: one operation at a time, and a small but whole multimodal decoder."""

from collections.abc import Mapping, Sequence

import numpy as np

from compiler.kernels.program import (
    ABSENT,
    Act,
    Buffer,
    Call,
    ExpertAct,
    KvCache,
    Module,
    NormKind,
    Op,
    Program,
    RouteOrder,
    Weight,
)

SHARED = "weights.shared"


class ModuleBuilder:
    """Collects buffers, weights and programs; ids are positions."""

    def __init__(self, seed: int = 0, max_tokens: int = 8, kv: KvCache | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.max_tokens = max_tokens
        self.kv = kv
        self.buffers: list[Buffer] = []
        self.weights: list[Weight] = []
        self.programs: list[Program] = []
        self.calls: list[Call] = []

    def buffer(self, rows: int | None, cols: int, dtype: str = "f32") -> int:
        """Add a buffer; rows None = dynamic."""
        dynamic = rows is None
        count = self.max_tokens if rows is None else rows
        self.buffers.append(Buffer(len(self.buffers), count, dynamic, cols, dtype))
        return len(self.buffers) - 1

    def weight(self, array: np.ndarray, kind: str = "f32", section: str = SHARED) -> int:
        self.weights.append(Weight(len(self.weights), kind, array, section))
        return len(self.weights) - 1

    def normal(self, *shape: int, scale: float = 1.0, offset: float = 0.0) -> np.ndarray:
        return (offset + scale * self.random.standard_normal(shape)).astype(np.float32)

    def vector(self, size: int, scale: float = 0.1, offset: float = 0.0) -> int:
        return self.weight(self.normal(size, scale=scale, offset=offset))

    def w4(self, n: int, k: int, section: str = SHARED) -> int:
        return self.weight(self.normal(n, k, scale=k**-0.5), "w4", section)

    def call(
        self,
        op: Op,
        inputs: Sequence[int],
        outputs: Sequence[int],
        weights: Sequence[int] = (),
        **params: float,
    ) -> int:
        """Add a call; return its first output."""
        self.calls.append(Call(op, tuple(inputs), tuple(outputs), tuple(weights), params))
        return outputs[0]

    def program(self, name: str, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> None:
        self.programs.append(Program(name, tuple(self.calls), inputs, outputs))
        self.calls = []

    def module(self) -> Module:
        return Module(
            tuple(self.programs),
            tuple(self.buffers),
            tuple(self.weights),
            self.kv,
            self.max_tokens,
        )


def single_call(
    op: Op,
    inputs: Sequence[tuple[int | None, int, str]],
    outputs: Sequence[tuple[int | None, int, str]],
    weights: Sequence[tuple[str, np.ndarray] | None] = (),
    params: Mapping[str, float] | None = None,
    *,
    kv: KvCache | None = None,
    max_tokens: int = 8,
) -> Module:
    """Return a module with one program `run` of one call; ports x0, x1, ... and y0, y1, ...

    A row count of None is dynamic; an input of zero columns is absent.
    """
    b = ModuleBuilder(max_tokens=max_tokens, kv=kv)
    sources = [b.buffer(*port) if port[1] else ABSENT for port in inputs]
    results = [b.buffer(*port) for port in outputs]
    constants = [ABSENT if w is None else b.weight(w[1], w[0]) for w in weights]
    b.call(op, sources, results, constants, **dict(params or {}))
    b.program(
        "run",
        {f"x{n}": at for n, at in enumerate(sources) if at != ABSENT},
        {f"y{n}": at for n, at in enumerate(results)},
    )
    return b.module()


class DecoderBuilder(ModuleBuilder):
    """A vision tower, an embedding table and a decoder of routed experts over one cache."""

    def __init__(
        self,
        seed: int = 0,
        *,
        layers: int = 2,
        width: int = 48,
        heads: int = 3,
        experts: int = 4,
        hidden: int = 40,
        vocabulary: int = 50,
        capacity: int = 64,
        max_tokens: int = 16,
        swiglu: bool = False,
    ) -> None:
        super().__init__(seed, max_tokens, KvCache(layers, heads, width // heads, capacity))
        self.layers, self.width, self.heads, self.experts = layers, width, heads, experts
        self.hidden, self.vocabulary, self.swiglu = hidden, vocabulary, swiglu
        half = width // heads // 2
        angle = np.arange(256)[:, None] * 10000.0 ** (-np.arange(half) / half)
        self.cos = self.weight(np.cos(angle).astype(np.float32))
        self.sin = self.weight(np.sin(angle).astype(np.float32))
        self.blocks = [self._block(layer) for layer in range(layers)]
        self.table = self.weight(self.normal(vocabulary, width))
        self.last_norm = self.vector(width, offset=1.0)
        self.head = self.w4(vocabulary, width)
        self.head_bias = self.vector(vocabulary)

    def _block(self, layer: int) -> dict[str, list[int]]:
        wide = self.hidden * (2 if self.swiglu else 1)
        experts = []
        for expert in range(self.experts):
            section = f"expert.L{layer}.E{expert}"
            experts += [
                self.w4(wide, self.width, section),
                self.w4(self.width, self.hidden, section),
            ]
        return {
            "norms": [self.vector(self.width, offset=1.0) for _ in range(2)],
            "qkvo": [self.w4(self.width, self.width) for _ in range(4)],
            "router": [self.weight(self.normal(self.experts, self.width, scale=0.3))],
            "experts": experts,
        }

    def decoder(self, x: int, positions: int, rows: int | None) -> tuple[int, list[int]]:
        """Add all blocks; return the last hidden rows and the router's index buffers."""
        routed = []
        for layer, block in enumerate(self.blocks):
            x, index = self._layer(layer, block, x, positions, rows)
            routed.append(index)
        return x, routed

    def _layer(
        self, layer: int, block: dict[str, list[int]], x: int, positions: int, rows: int | None
    ) -> tuple[int, int]:
        def new(cols: int = self.width, dtype: str = "f32") -> int:
            return self.buffer(rows, cols, dtype)

        rms = {"kind": NormKind.RMS, "eps": 1e-6}
        h = self.call(Op.NORM, [x], [new()], [block["norms"][0]], **rms)
        q, k, v = (self.call(Op.LINEAR, [h], [new()], [w]) for w in block["qkvo"][:3])
        tables = (self.cos, self.sin)
        q = self.call(Op.ROPE, [q, positions], [new()], tables, heads=self.heads)
        k = self.call(Op.ROPE, [k, positions], [new()], tables, heads=self.heads)
        scale = (self.width // self.heads) ** -0.5
        seen = self.call(
            Op.ATTENTION, [q, k, v], [new()], heads=self.heads, scale=scale, kv_layer=layer
        )
        x = self.call(Op.LINEAR, [seen, x], [new()], [block["qkvo"][3]])
        h = self.call(Op.NORM, [x], [new()], [block["norms"][1]], **rms)
        index, gate = new(2, "i32"), new(2)
        self.call(Op.ROUTE, [h], [index, gate], block["router"], k=2, order=RouteOrder.TOPK_SOFTMAX)
        kind = ExpertAct.SWIGLU if self.swiglu else ExpertAct.RELU
        mixed = self.call(Op.EXPERTS, [h, index, gate], [new()], block["experts"], act=kind)
        return self.call(Op.ADD, [x, mixed], [new()]), index

    def add_step(self) -> None:
        """Add program `step`."""
        ids, positions = self.buffer(None, 1, "i32"), self.buffer(None, 1, "i32")
        x = self.call(Op.EMBED, [ids], [self.buffer(None, self.width)], [self.table])
        x, routed = self.decoder(x, positions, None)
        last = self.call(Op.ROWS_SLICE, [x], [self.buffer(1, self.width)], start=-1, count=1)
        last = self.call(
            Op.NORM, [last], [self.buffer(1, self.width)], [self.last_norm], kind=0, eps=1e-6
        )
        logits = self.call(
            Op.LINEAR, [last], [self.buffer(1, self.vocabulary)], [self.head, self.head_bias]
        )
        token = self.call(Op.ARGMAX, [logits], [self.buffer(1, 1, "i32")])
        chosen = [
            self.call(Op.ROWS_SLICE, [index], [self.buffer(1, 2, "i32")], start=-1, count=1)
            for index in routed
        ]
        routing = self.buffer(1, 2 * self.layers, "i32")
        self.call(Op.COLS_CONCAT, chosen, [routing])
        self.program(
            "step",
            {"token_ids": ids, "positions": positions},
            {"logits": logits, "token": token, "routing": routing},
        )

    def add_see(self, side: int = 16, kept: int = 6) -> None:
        """Add program `see`: a stem of two convolutions, one attention block, pruning, decoder."""
        image = self.buffer(1, side * side, "u8")
        x = self.call(
            Op.IMAGE_U8, [image], [self.buffer(side * side, 1)], divide=127.5, subtract=1.0
        )
        channels = 1
        for out, relu in ((10, Act.RELU), (self.width, Act.NONE)):
            weight = self.weight(self.normal(out, 9 * channels, scale=(9 * channels) ** -0.5))
            side_out = (side + 1) // 2
            x = self.call(
                Op.CONV2D,
                [x],
                [self.buffer(side_out**2, out)],
                [weight, self.vector(out)],
                kh=3,
                kw=3,
                stride=2,
                pad=1,
                act=relu,
                H=side,
                W=side,
            )
            side, channels = side_out, out
        patches = side * side
        tokens = self.buffer(patches + 1, self.width)
        self.call(Op.ROWS_CONCAT, [ABSENT, x], [tokens], [self.weight(self.normal(1, self.width))])
        x = self._see_block(tokens, patches, kept)
        positions = self.calls[-2].outputs[1]
        hidden, routed = self.decoder(x, positions, kept)
        self.program("see", {"image": image}, {"hidden": hidden, "kept": positions})
        assert len(routed) == self.layers

    def _see_block(self, x: int, patches: int, kept: int) -> int:
        rows = patches + 1
        norm = (self.vector(self.width, offset=1.0), self.vector(self.width))
        h = self.call(
            Op.NORM, [x], [self.buffer(rows, self.width)], norm, kind=NormKind.LAYER, eps=1e-5
        )
        parts = [
            self.call(
                Op.LINEAR,
                [h],
                [self.buffer(rows, self.width)],
                [self.w4(self.width, self.width), self.vector(self.width)],
            )
            for _ in range(3)
        ]
        scale = (self.width // self.heads) ** -0.5
        seen = self.call(
            Op.ATTENTION, parts, [self.buffer(rows, self.width)], heads=self.heads, scale=scale
        )
        score = self.call(
            Op.ATTENTION_ROW,
            parts[:2],
            [self.buffer(rows, 1)],
            heads=self.heads,
            scale=scale,
            row=0,
        )
        body = self.call(
            Op.ROWS_SLICE, [seen], [self.buffer(patches, self.width)], start=1, count=-1
        )
        chosen, positions = self.buffer(kept, self.width), self.buffer(kept, 1, "i32")
        self.call(Op.PRUNE, [body, score], [chosen, positions], k=kept, score_offset=1)
        return self.call(
            Op.LINEAR,
            [chosen],
            [self.buffer(kept, self.width)],
            [self.w4(self.width, self.width)],
            act=Act.SILU,
        )


def small_decoder(seed: int = 0, *, swiglu: bool = False, see: bool = True) -> Module:
    """Return a whole model: programs `see` (unless turned off) and `step`."""
    builder = DecoderBuilder(seed, swiglu=swiglu)
    if see:
        builder.add_see()
    builder.add_step()
    return builder.module()
