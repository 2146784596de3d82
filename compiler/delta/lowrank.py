"""Low-rank replay: new W4 codes from old ones and two small factors, the same bits everywhere.

    q' = clip(q + (P * M + D) >> 30, 0, 15)      P = left @ right

    left, right   int8 factors (N, rank), (rank, K); |P| < 2^21, exact in any order
    M             2^30 / (step of the group, in units of P), an integer from the bits of the scales
    D             dither, 16 random bits << 14: a change smaller than a step is not lost, it is made
                  by its share of the codes

Only integers take part, so a server and every device make the same codes. The dither of a panel of
16 rows comes from SHAKE-128 over seed and panel number, so panels are made in any order. A release
that is merged like this ships as its factors. Codes that were clipped are listed, so that the way
back is exact too. Called by `compiler.delta.replay` for records, and by whoever merges a release.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compiler.contract.delta import DeltaFormatError, DeltaLimitError
from compiler.delta.blobs import BlobReader, pack_blob

Bytes = npt.NDArray[np.uint8]
Factor = npt.NDArray[np.int8]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

PANEL: Final = 16
GROUP: Final = 32
CODES_A_BYTE: Final = 2
MAX_RANK: Final = 64
MAX_COLS: Final = 8192
MAX_FACTOR_BYTES: Final = 1 << 20
"""Of both factors; so a device needs a few megabytes, whatever the matrix."""
SEED_BYTES: Final = 16

_HEAD: Final = struct.Struct("<IIHHI16s")
_FRACTION: Final = 30
_MOST_STEPS: Final = 1 << 34  # 16 codes a unit: more than there are
_TOP_CODE: Final = 15
_LEAST_NUMERATOR: Final = 1 << 31
_MAX_NUMERATOR: Final = (1 << 32) - 1
_MAX_SHIFT: Final = 255
_MANTISSA: Final = 23
_BIAS: Final = 127
_SPECIAL: Final = 255


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What is added to a W4 matrix: `left @ right * numerator * 2^-shift`.

    Attributes:
        left: (N, rank) int8.
        right: (rank, K) int8.
        numerator: 2^31 to 2^32 - 1.
        shift: 0 to 255.
        seed: Of the dither, 16 bytes; another one for every weight and release.

    Raises:
        DeltaLimitError: A size is above its limit.
        DeltaFormatError: The shapes do not fit, or a number is out of range.
    """

    left: Factor
    right: Factor
    numerator: int
    shift: int
    seed: bytes

    def __post_init__(self) -> None:
        rows, rank = self.left.shape
        require_sizes(rows, self.right.shape[1], rank)
        if self.right.shape[0] != rank or len(self.seed) != SEED_BYTES:
            raise DeltaFormatError("factors of other ranks, or a seed of another length")
        if not _LEAST_NUMERATOR <= self.numerator <= _MAX_NUMERATOR or self.shift > _MAX_SHIFT:
            raise DeltaFormatError("the unit of the factors is out of range")

    @property
    def rows(self) -> int:
        """N."""
        return int(self.left.shape[0])

    @property
    def cols(self) -> int:
        """K."""
        return int(self.right.shape[1])

    def to_bytes(self) -> bytes:
        """Return the beginning of the payload of a record."""
        rank = self.left.shape[1]
        head = _HEAD.pack(self.rows, self.cols, rank, self.shift, self.numerator, self.seed)
        return head + pack_blob(self.left.tobytes()) + pack_blob(self.right.tobytes())


def read_factors(reader: BlobReader) -> Factors:
    """Return the factors at the beginning of a payload; sizes are checked before they are unpacked.

    Raises:
        DeltaLimitError: A size is above its limit.
        DeltaFormatError: Anything else is not as it must be.
    """
    rows, cols, rank, shift, numerator, seed = _HEAD.unpack(reader.take(_HEAD.size))
    require_sizes(rows, cols, rank)
    left = np.frombuffer(reader.blob(rows * rank, exact=True), np.int8).reshape(rows, rank)
    right = np.frombuffer(reader.blob(rank * cols, exact=True), np.int8).reshape(rank, cols)
    return Factors(left, right, numerator, shift, seed)


def require_sizes(rows: int, cols: int, rank: int) -> None:
    """Check the shape of factors.

    Raises:
        DeltaLimitError: A size is above its limit.
        DeltaFormatError: A size is 0.
    """
    if not (rows and cols and rank):
        raise DeltaFormatError("empty factors")
    if rank > MAX_RANK or cols > MAX_COLS or rank * (rows + cols) > MAX_FACTOR_BYTES:
        raise DeltaLimitError(f"factors of rank {rank} for {rows} x {cols}")


def quantise_factors(left: Floats, right: Floats, seed: bytes) -> Factors:
    """Return int8 factors of about `left @ right`, balanced rank by rank.

    Args:
        left: (N, rank) f32, scale of the adapter included.
        right: (rank, K) f32.
        seed: 16 bytes.

    Raises:
        DeltaFormatError: A factor is all zero, not finite, or of another shape.
    """
    peaks = np.abs(left).max(axis=0), np.abs(right).max(axis=1)
    if not (np.isfinite(peaks[0] * peaks[1]).all() and (peaks[0] * peaks[1]).any()):
        raise DeltaFormatError("factors that are not finite, or all zero")
    floor = np.float32(1e-20)
    gain = np.sqrt(np.maximum(peaks[1], floor) / np.maximum(peaks[0], floor))
    balanced = left * gain, right / gain[:, None]
    tops = [float(np.abs(part).max()) / 127 for part in balanced]
    codes = [np.rint(part / top).astype(np.int8) for part, top in zip(balanced, tops, strict=True)]
    mantissa, exponent = np.frexp(tops[0] * tops[1])
    numerator = min(round(float(mantissa) * (1 << 32)), _MAX_NUMERATOR)
    return Factors(codes[0], codes[1], numerator, 32 - int(exponent), seed)


class Stripes:
    """Replays a matrix a few panels at a time, in either direction.

    Codes, scales and rows are those of `Kind.W4`: codes [panel][group][4 cells][64 bytes], scales
    [panel][group][16] u8, rows [panel][16] f32.
    """

    def __init__(self, factors: Factors) -> None:
        self._factors = factors
        self.panels: Final = -(-factors.rows // PANEL)
        self.groups: Final = -(-factors.cols // GROUP)
        rank = factors.left.shape[1]
        self._left = np.zeros((self.panels * PANEL, rank), np.int8)
        self._left[: factors.rows] = factors.left
        self._right = np.zeros((rank, self.groups * GROUP), np.int32)
        self._right[:, : factors.cols] = factors.right

    @property
    def codes_bytes(self) -> int:
        """Bytes of the codes of one panel."""
        return PANEL * self.groups * GROUP // CODES_A_BYTE

    @property
    def scales_bytes(self) -> int:
        """Bytes of the group scales of one panel."""
        return PANEL * self.groups

    def replay(
        self, panel: int, codes: bytes, scales: bytes, rows: bytes, *, reverse: bool = False
    ) -> tuple[Bytes, npt.NDArray[np.int64]]:
        """Return the codes that one panel becomes, and where clipping lost what was before.

        Args:
            panel: Its number.
            codes: Packed codes before; with `reverse`, after.
            scales: Its group scales.
            rows: Its row scales.
            reverse: Whether the change is taken back; what was clipped is then a wrong code.

        Returns:
            Packed codes (codes_bytes,) and positions of clipped codes, counted as byte * 2 + half.
        """
        steps = self._steps(panel, scales, rows)
        low_high = np.frombuffer(codes, np.uint8).reshape(self.groups, 4, PANEL, 4)
        before = np.stack((low_high & 15, low_high >> 4), axis=-1).astype(np.int64)
        after = before - steps if reverse else before + steps
        clipped = np.clip(after, 0, _TOP_CODE)
        lost = np.flatnonzero(clipped != after)
        packed = clipped.astype(np.uint8)
        return (packed[..., 0] | packed[..., 1] << 4).reshape(-1), lost

    def _steps(self, panel: int, scales: bytes, rows: bytes) -> Integers:
        """Return by how many codes each code moves, (groups, 4 cells, 16 rows, 4, 2)."""
        exponent, mantissa = _units(rows)
        groups = np.frombuffer(scales, np.uint8).reshape(self.groups, PANEL)
        steps = _reciprocals(self._factors, exponent, mantissa * groups)
        seed = self._factors.seed + panel.to_bytes(4, "little")
        width = self.groups * GROUP
        noise = hashlib.shake_128(seed).digest(2 * PANEL * width)
        dither = np.frombuffer(noise, "<u2").reshape(PANEL, width).astype(np.int64)
        moved = self._products(panel).astype(np.int64)
        by_group = moved.reshape(PANEL, self.groups, GROUP)
        by_group *= steps.T[:, :, None]
        moved += dither << (_FRACTION - 16)
        moved >>= _FRACTION
        cells = moved.reshape(PANEL, self.groups, 4, 2, 4)
        return cells.transpose(1, 2, 0, 4, 3)

    def _products(self, panel: int) -> npt.NDArray[np.int32]:
        """Return P of a panel, (16, K): rank by rank, so that no library is asked for a sum."""
        left = self._left[panel * PANEL : (panel + 1) * PANEL].astype(np.int32)
        total: npt.NDArray[np.int32] = left[:, :1] * self._right[0]
        part = np.empty_like(total)
        for rank in range(1, left.shape[1]):
            np.multiply(left[:, rank : rank + 1], self._right[rank], out=part)
            total += part
        return total


def replay_codes(codes: bytes, scales: bytes, rows: bytes, factors: Factors) -> bytes:
    """Return the codes of a matrix merged with factors: what a server releases.

    Args:
        codes: Packed codes of `Kind.W4`.
        scales: Its group scales.
        rows: Its row scales.
        factors: Of the same shape.

    Raises:
        DeltaFormatError: The arrays have other sizes than the factors.
    """
    stripes = Stripes(factors)
    sizes = (stripes.codes_bytes, stripes.scales_bytes, 4 * PANEL)
    arrays = (codes, scales, rows)
    if any(len(a) != n * stripes.panels for a, n in zip(arrays, sizes, strict=True)):
        raise DeltaFormatError("factors of another shape than the weight")
    made = []
    for panel in range(stripes.panels):
        parts = [a[panel * n : (panel + 1) * n] for a, n in zip(arrays, sizes, strict=True)]
        made.append(stripes.replay(panel, *parts)[0].tobytes())
    return b"".join(made)


def _units(rows: bytes) -> tuple[Integers, Integers]:
    """Return (exponent, mantissa) of row scales, (16,) each: `mantissa * 2^exponent`.

    The mantissa is 0 for a row scale of zero, below the normal numbers, negative or not finite:
    such rows keep their codes.
    """
    bits = np.frombuffer(rows, "<u4").astype(np.int64)
    exponent = bits >> _MANTISSA
    mantissa = (bits & (1 << _MANTISSA) - 1) | 1 << _MANTISSA
    mantissa[(exponent == 0) | (exponent >= _SPECIAL)] = 0  # what is above holds a sign bit too
    return exponent - _BIAS - _MANTISSA, mantissa


def _reciprocals(factors: Factors, exponent: Integers, steps: Integers) -> Integers:
    """Return M: numerator * 2^(30 - shift - exponent) / steps, (groups, 16); 0 for no step.

    Args:
        factors: Hold numerator and shift.
        exponent: Of the row scales, (16,).
        steps: Mantissa of the row scale times group scale, (groups, 16), below 2^32.
    """
    shift = _FRACTION - factors.shift - exponent
    scaled = np.int64(factors.numerator) << np.clip(shift, 0, _FRACTION)
    scaled >>= np.clip(-shift, 0, 62)
    found = np.minimum(scaled // np.maximum(steps, 1), _MOST_STEPS)
    found = np.where(shift > _FRACTION, _MOST_STEPS, found)
    return np.where(steps == 0, 0, found)
