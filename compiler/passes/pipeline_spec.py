"""What a submission says about itself (`pipeline.json`), as values.

`compiler.frontend.pipeline_json` reads the file; passes only see these classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.contract.pipeline import ImageSpec as PictureSize

FAMILY_VISION = "vision-embed-decoder"
FAMILY_GRAPH = "graph"
QUANTISE_W4 = "w4"
QUANTISE_W8 = "w8"
QUANTISE_NONE = "none"
QUANTISE = (QUANTISE_W4, QUANTISE_W8, QUANTISE_NONE)
ROLE_TENSOR = "tensor"
POSITION_ROWS = ("positions", "positions_height", "positions_width")
"""Roles of the rows of positions of a picture's tokens; the first alone where there is one row."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a component.

    Attributes:
        name: The ONNX value's name; used once, to find the value.
        role: What it means; the only thing passes look at.
        value: The number fed to an input of role `constant`.
        shape: Sizes that an input of family `graph` always has; None = as its role says.
    """

    name: str
    role: str
    value: float | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Component:
    """One ONNX file of the submission."""

    name: str
    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """How pixels (u8, HWC) become the float image: `pixel / divide - subtract`.

    Attributes:
        grid: Rows and columns of the picture's tokens where they are no square and the decoder
            tells height from width.
    """

    height: int
    width: int
    channels: int
    divide: float
    subtract: float
    grid: tuple[int, int] | None = None

    @property
    def size(self) -> PictureSize:
        """What a device knows of it."""
        return PictureSize(self.height, self.width, self.channels, self.grid)


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """Vocabulary and prompts.

    Attributes:
        vocabulary: Token text by id.
        eos: Id that ends an answer.
        position_base: Position of the first text token.
        prompts: Token sequences by name.
        max_answer_tokens: Where an answer is cut off.
    """

    vocabulary: tuple[str, ...]
    eos: int
    position_base: int
    prompts: Mapping[str, tuple[str, ...]]
    max_answer_tokens: int


@dataclass(frozen=True, slots=True)
class PruneSpec:
    """Adaptive pruning of visual tokens, in place of the fixed number that the graph states.

    Attributes:
        p: Share of the attention that kept tokens must hold, in (0, 1].
        min_keep, max_keep: Bounds of the number of kept tokens; `max_keep` may exceed the tokens.
        merge: Context tokens that stand for the others, at most.
        score: Whose attention counts: of the `row` that the graph uses, or the `mean` over all
            tokens, for which no class token is needed.
    """

    p: float
    min_keep: int
    max_keep: int
    merge: int
    score: str


@dataclass(frozen=True, slots=True)
class KvWindow:
    """What a token sees of a long context: the first `sink` rows and the last `window` rows."""

    sink: int
    window: int


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A whole submission.

    Attributes:
        max_context: The longest context, in rows; without `kv` also the rows of the cache.
        max_step_tokens: The most token rows of one run (T).
        prune: Adaptive pruning; None keeps what the graph says.
        kv: A window over the cache, if the submission asks for one.
        quantise: `w4` stores large matrices in four bits, `w8` in eight; `none` keeps every weight
            as it is but those of experts, which are in four.
        merge_adapters: Whether low-rank branches are merged into the weights beside them.
    """

    family: str
    components: tuple[Component, ...]
    max_context: int
    max_step_tokens: int
    image: ImageSpec | None = None
    tokens: TokenSpec | None = None
    prune: PruneSpec | None = None
    kv: KvWindow | None = None
    quantise: str = QUANTISE_W4
    merge_adapters: bool = False

    def component(self, name: str) -> Component:
        """Return the component called `name`."""
        return next(c for c in self.components if c.name == name)

    @property
    def experts(self) -> str:
        """In how many bits experts are stored: as other large matrices, in four if those stay."""
        return QUANTISE_W8 if self.quantise == QUANTISE_W8 else QUANTISE_W4

    @property
    def max_positions(self) -> int:
        """One more than the highest position a token can have."""
        base = self.tokens.position_base if self.tokens is not None else 0
        return base + self.max_context
