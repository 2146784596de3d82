"""The operators of the ONNX domain that are refused, each with its reason and the way out.

`evaluate` raises them by name; `operator_table` prints them. An operator of the standard is in
exactly one place: a row of `onnx_ops`, an expansion, control flow, sequences, or here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an operator cannot be compiled, and what to do instead."""

    reason: str
    way_out: str


_RANDOM: Final = Refusal(
    "its result is random, so no two devices and no two runs would agree",
    "draw the numbers in the application and feed them as an input",
)
_TEXT: Final = Refusal(
    "it works on text, and a plan holds numbers", "do it in the application, before the model"
)
_LOSS: Final = Refusal("it is a loss for training", "export the model in inference mode")
_GONE: Final = "ONNX itself replaced it, in operator set 11 at the latest"

REFUSED: Final[Mapping[str, Refusal]] = MappingProxyType(
    {
        "Bernoulli": _RANDOM,
        "BitCast": Refusal(
            "a device holds integers in 32 bits and no other width to look at bits through",
            "compute with Cast, or with the numbers themselves",
        ),
        "DeformConv": Refusal(
            "its taps move at run time and there is no kernel for it",
            "write it as GridSample and Conv, which are compiled",
        ),
        "ImageDecoder": Refusal(
            "a plan takes pixels, not files", "decode the picture in the application"
        ),
        "MaxRoiPool": Refusal(
            "the size of its windows is known only at run time",
            "cut the model in front of it, or pool with GridSample on a fixed grid",
        ),
        "Multinomial": _RANDOM,
        "NegativeLogLikelihoodLoss": _LOSS,
        "NonMaxSuppression": Refusal(
            "how many boxes remain is known only at run time, and a plan has fixed sizes",
            "cut the model in front of it, output boxes and scores (TopK bounds them), and choose"
            " in the application",
        ),
        "RandomNormal": _RANDOM,
        "RandomNormalLike": _RANDOM,
        "RandomUniform": _RANDOM,
        "RandomUniformLike": _RANDOM,
        "RegexFullMatch": _TEXT,
        "Scatter": Refusal(_GONE, "use ScatterElements"),
        "SequenceMap": Refusal(
            "it applies a graph to a sequence of unknown length", "use Loop or Scan"
        ),
        "SoftmaxCrossEntropyLoss": _LOSS,
        "StringConcat": _TEXT,
        "StringNormalizer": _TEXT,
        "StringSplit": _TEXT,
        "TfIdfVectorizer": _TEXT,
        "Upsample": Refusal(_GONE, "use Resize"),
    }
)
