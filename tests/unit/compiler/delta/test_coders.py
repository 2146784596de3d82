"""Each coder by itself, on inputs it was made for and on payloads that lie."""

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.delta import MODES, DeltaFormatError, Mode, RecordKind
from compiler.delta.blobs import BlobReader, make_frame, open_frame, pack_blob
from compiler.delta.chunks import decode_chunk, encode_chunk
from compiler.delta.gaps import pack_gaps, read_gaps
from compiler.delta.residuals import CODERS
from tests.unit.compiler.delta.bundles import draw_codes, move_codes, pack_codes

STREAMS = [RecordKind.CODES4, RecordKind.SCALES8, RecordKind.F32, RecordKind.RAW]


def _blob(raw_length: int, stored: bytes) -> bytes:
    return struct.pack("<II", raw_length, len(stored)) + stored


@pytest.mark.parametrize(
    ("kind", "mode"), [(k, m) for k in STREAMS for m in sorted(MODES[k] - {Mode.SAME})]
)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), words=st.integers(1, 300), share=st.floats(0, 1))
def test_each_mode_leads_both_ways_wherever_it_applies(kind, mode, seed, words, share):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, 4 * words).astype(np.uint8)
    residual = rng.integers(0, 256, 4 * words).astype(np.uint8) * (rng.random(4 * words) < share)
    payload = CODERS[mode].encode(residual)
    if payload is None:
        return
    new = decode_chunk(kind, mode, old.tobytes(), payload, reverse=False)
    assert decode_chunk(kind, mode, new, payload, reverse=True) == old.tobytes()
    reader = BlobReader(payload)
    assert CODERS[mode].decode(reader, residual.size).tobytes() == residual.tobytes()
    reader.finish()


def test_it_chooses_the_mode_that_fits_the_update():
    rng = np.random.default_rng(0)
    codes = draw_codes(rng, 65_536)
    tile = codes.copy()
    tile[512 * 40 : 512 * 41] = rng.integers(0, 16, 512)
    scales = rng.integers(1, 256, 4096).astype(np.uint8)
    one = scales.copy()
    one[9] += 1
    floats = rng.random(4096).astype("<f4")
    few = floats.copy()
    few[::500] *= 2
    mask = rng.integers(0, 256, 4096).astype(np.uint8)
    bits = mask ^ np.packbits(rng.random(8 * 4096) < 0.01)
    rows = [
        (RecordKind.CODES4, pack_codes(codes), pack_codes(codes), Mode.SAME),
        (RecordKind.CODES4, pack_codes(codes), pack_codes(move_codes(rng, codes, 0.15)), Mode.GAPS),
        (RecordKind.CODES4, pack_codes(codes), pack_codes(rng.permutation(codes)), Mode.DENSE),
        (RecordKind.CODES4, pack_codes(codes), pack_codes(tile), Mode.BLOCKS),
        (RecordKind.SCALES8, scales.tobytes(), one.tobytes(), Mode.BLOCKS),
        (RecordKind.SCALES8, scales.tobytes(), (scales + 1).tobytes(), Mode.DENSE),
        (RecordKind.F32, floats.tobytes(), (floats * 1.01).astype("<f4").tobytes(), Mode.WORDS),
        (RecordKind.F32, floats.tobytes(), few.tobytes(), Mode.SPARSE_WORDS),
        (RecordKind.RAW, mask.tobytes(), bits.tobytes(), Mode.BITS),
    ]
    for kind, old, new, expected in rows:
        assert encode_chunk(kind, old, new)[0] is expected


@given(st.sets(st.integers(0, 5000), max_size=400))
@settings(max_examples=50, deadline=None)
def test_gaps_give_back_any_ascending_list(positions):
    ascending = np.array(sorted(positions), np.int64)
    reader = BlobReader(pack_gaps(ascending))
    assert read_gaps(reader, limit=5001, most=400).tolist() == ascending.tolist()


@pytest.mark.parametrize(
    "steps",
    [b"\xff", b"\x01\xff", bytes([10] * 10), bytes([0] * 21), b"\xff\x00"],
    ids=["only an escape", "ends in an escape", "too far", "too many", "one too far"],
)
def test_gaps_refuse_a_list_that_lies(steps):
    with pytest.raises(DeltaFormatError):
        read_gaps(BlobReader(pack_blob(steps)), limit=100, most=20)


def test_a_blob_refuses_a_size_before_it_inflates_anything():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 26))
    assert len(bomb) < 10_000
    honest = _blob(1 << 26, bomb)
    shrunk = _blob(1 << 20, bomb)
    for payload in (honest, shrunk):
        with pytest.raises(DeltaFormatError):
            BlobReader(payload).blob(1 << 20)


RAW = b"a" * 1000
PLAIN = zstandard.ZstdCompressor().compress(RAW)
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(RAW)
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(_blob(1000, UNSIZED), id="no content size"),
        pytest.param(_blob(1000, PLAIN + PLAIN), id="a second frame"),
        pytest.param(_blob(1000, PLAIN + SKIPPABLE), id="a skippable frame behind"),
        pytest.param(_blob(1000, SKIPPABLE + PLAIN), id="a skippable frame in front"),
        pytest.param(_blob(1000, PLAIN + b"x"), id="bytes behind"),
        pytest.param(_blob(1000, PLAIN[:-1]), id="cut frame"),
        pytest.param(_blob(999, PLAIN), id="another length"),
        pytest.param(_blob(1000, b"x" * 20), id="no frame"),
        pytest.param(_blob(1, b"xx"), id="stored longer than raw"),
        pytest.param(_blob(1000, PLAIN)[:-1], id="cut blob"),
        pytest.param(bytes(3), id="cut lengths"),
    ],
)
def test_a_blob_refuses_everything_but_one_plain_frame_of_its_length(payload):
    assert BlobReader(_blob(1000, PLAIN)).blob(1000) == RAW
    with pytest.raises(DeltaFormatError):
        BlobReader(payload).blob(1000)


def test_a_frame_needs_its_checksum_where_one_is_due():
    raw = bytes(range(256)) * 8
    with pytest.raises(DeltaFormatError, match="checksum"):
        open_frame(zstandard.ZstdCompressor().compress(raw), len(raw), checksum=True)
    frame = bytearray(make_frame(raw))
    assert open_frame(bytes(frame), len(raw), checksum=True) == raw
    frame[-1] ^= 1
    with pytest.raises(DeltaFormatError):
        open_frame(bytes(frame), len(raw), checksum=True)


def test_a_frame_of_too_large_a_window_is_refused():
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=26)
    raw = np.random.default_rng(0).bytes(1 << 10)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=1 << 25)
    frame = compressor.compress(raw * (1 << 15)) + compressor.flush()
    with pytest.raises(DeltaFormatError, match="window"):
        open_frame(frame, 1 << 25)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_payload_with_bytes_behind_it_is_refused(kind):
    old, new = bytes(64), bytes(range(64))
    mode, payload = encode_chunk(kind, old, new)
    assert decode_chunk(kind, mode, old, payload, reverse=False) == new
    with pytest.raises(DeltaFormatError, match="left"):
        decode_chunk(kind, mode, old, payload + b"\0", reverse=False)


@pytest.mark.parametrize("log", [1, 9, 31, 255])
def test_blocks_of_an_impossible_size_are_refused(log):
    payload = bytes([log]) + pack_gaps(np.array([0])) + pack_blob(b"x" * 2)
    with pytest.raises(DeltaFormatError):
        decode_chunk(RecordKind.RAW, Mode.BLOCKS, bytes(33), payload, reverse=False)


@pytest.mark.parametrize("log", [0, 6, 9, 255])
def test_half_blocks_of_an_impossible_size_are_refused(log):
    payload = bytes([log]) + pack_gaps(np.array([0])) + pack_blob(b"x" * 2)
    with pytest.raises(DeltaFormatError):
        decode_chunk(RecordKind.CODES4, Mode.HALVES, bytes(32), payload, reverse=False)


def test_extreme_words_survive_the_zigzag():
    old = np.array([0, 1, 2**31, 2**32 - 1, 2**31 - 1], "<u4")
    new = np.array([2**31, 0, 2**31 - 1, 0, 2**32 - 1], "<u4")
    mode, payload = encode_chunk(RecordKind.F32, old.tobytes(), new.tobytes())
    made = decode_chunk(RecordKind.F32, mode, old.tobytes(), payload, reverse=False)
    assert made == new.tobytes()
