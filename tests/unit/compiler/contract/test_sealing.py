"""Sealed sections and wrapped keys: vectors kept for ever, and everything that must fail."""

import hashlib
import hmac
import itertools
import random

import pytest
from cryptography.hazmat.bindings._rust import openssl
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from compiler.contract import sealing
from compiler.contract.canonical import sha256_hex
from compiler.contract.errors import ContractError
from compiler.contract.manifest import Sealed, Section, parse_manifest
from compiler.contract.planes import SEAL_TAG_BYTES, SEALED_CHUNK_BYTES, sealed_size
from compiler.contract.sealing import (
    WRAPPED_BYTES,
    SealError,
    seal,
    unseal,
    unwrap_key,
    wrap_key,
)
from tests.simulators.bundles import ToySpec, sealed_toy, toy_bundle

KEY = bytes(range(32))
SIZES = [0, 1, SEALED_CHUNK_BYTES - 1, SEALED_CHUNK_BYTES, SEALED_CHUNK_BYTES + 1, 200_000]
WHOLE = SEALED_CHUNK_BYTES + SEAL_TAG_BYTES


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def sealed(data: bytes, component: str = "plan", key: bytes = KEY) -> bytes:
    return b"".join(seal(key, component, sha256_hex(data), [data]))


def opened(box: bytes, data: bytes, component: str = "plan", key: bytes = KEY) -> bytes:
    return b"".join(unseal(key, component, sha256_hex(data), [box]))


def by_the_book(data: bytes, component: str) -> bytes:
    """Seal as the format document says, without the code under test."""
    name = f"{component}|{hashlib.sha256(data).hexdigest()}".encode()
    extracted = hmac.digest(bytes(32), KEY, "sha256")
    object_key = hmac.digest(extracted, b"sparsefleet.object/1|" + name + b"\x01", "sha256")
    chunks = [data[at : at + 65_536] for at in range(0, len(data), 65_536)] or [b""]
    cipher, box = ChaCha20Poly1305(object_key), b""
    for number, chunk in enumerate(chunks):
        nonce = number.to_bytes(11, "big") + bytes([number == len(chunks) - 1])
        box += cipher.encrypt(nonce, chunk, name)
    return box


@pytest.mark.parametrize("size", SIZES)
def test_it_seals_as_the_format_says_and_opens_again(size):
    data = content(size)
    box = sealed(data)
    assert box == by_the_book(data, "plan")
    assert len(box) == sealed_size(size)
    assert opened(box, data) == data
    assert sealed(data) == box  # the same again, so a second build keeps nothing twice


def test_it_keeps_its_vector():
    box = sealed(b"sparsefleet" * 10_000, "expert.L0.E1")
    assert sha256_hex(box) == "894d694cc946c1bf637331bf4c2aed19eab5350771a4b74f68a1894c2831afb3"


@given(cuts=st.lists(st.integers(0, 200_000), max_size=8))
def test_it_does_not_care_how_the_bytes_come(cuts):
    data = content(200_000)
    box = sealed(data)

    def pieces(whole: bytes) -> list[bytes]:
        at = [0, *sorted(cuts), len(whole)]
        return [whole[start:end] for start, end in itertools.pairwise(at)]

    digest = sha256_hex(data)
    assert b"".join(seal(KEY, "plan", digest, pieces(data))) == box
    assert b"".join(unseal(KEY, "plan", digest, pieces(box))) == data


def damaged(box: bytes) -> dict[str, bytes]:
    chunks = [box[at : at + WHOLE] for at in range(0, len(box), WHOLE)]
    flipped = bytearray(box)
    flipped[WHOLE + 5] ^= 1
    return {
        "a changed bit": bytes(flipped),
        "a changed tag": box[:-1] + bytes([box[-1] ^ 1]),
        "the end is missing": b"".join(chunks[:-1]),
        "half of the end is missing": box[:-9],
        "the beginning is missing": b"".join(chunks[1:]),
        "a chunk is left out": b"".join(chunks[:1] + chunks[2:]),
        "chunks are swapped": b"".join([chunks[1], chunks[0], *chunks[2:]]),
        "a chunk comes twice": b"".join([chunks[0], chunks[0], *chunks[1:]]),
        "more comes behind": box + b"x",
        "another chunk comes behind": box + chunks[0],
        "nothing": b"",
    }


@pytest.mark.parametrize("how", damaged(sealed(content(200_000))))
def test_it_opens_nothing_that_was_touched(how):
    data = content(200_000)
    with pytest.raises(SealError):
        opened(damaged(sealed(data))[how], data)


def test_it_opens_a_section_only_as_what_it_is():
    data, other = content(1000), content(1001)
    box = sealed(data)
    for attempt in (
        lambda: opened(box, data, component="kernels"),
        lambda: opened(box, other),
        lambda: opened(box, data, key=bytes(32)),
    ):
        with pytest.raises(SealError):
            attempt()


def test_it_uses_no_nonce_twice_under_one_key():
    """Two sections of one release differ although text, key and counter are the same."""
    data = content(1000)
    boxes = [sealed(data, component) for component in ("plan", "kernels", "delta")]
    assert len({box[:16] for box in boxes}) == 3


# --- keys that are wrapped ------------------------------------------------------------------------


def test_it_is_the_hpke_of_rfc_9180():
    """Appendix A.2.1.1, base mode, first and only message of a context."""
    private = X25519PrivateKey.from_private_bytes(
        bytes.fromhex("8057991eef8f1f1af18f4a9491d16a1ce333f695d4db8e38da75975c4478e0fb")
    )
    enc = bytes.fromhex("1afa08d3dec047a643885163f1180476fa7ddb54c6a8029ea33f95796bf2ac4a")
    ciphertext = bytes.fromhex(
        "1c5250d8034ec2b784ba2cfd69dbdb8af406cfe3ff938e131f0def8c8b60b4db21993c62ce81883d2dd1b51a28"
    )
    plain = openssl.hpke._decrypt_with_aad(
        sealing._SUITE,
        enc + ciphertext,
        private,
        info=b"Ode on a Grecian Urn",
        aad=b"Count-0",
    )
    assert plain == b"Beauty is truth, truth beauty"


def pair() -> tuple[X25519PrivateKey, bytes]:
    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def test_it_wraps_a_key_for_one_device_and_one_manifest():
    private, public = pair()
    wrapped = wrap_key(KEY, public, "d" * 32, "a" * 64)
    assert len(wrapped) == WRAPPED_BYTES == 80
    assert unwrap_key(wrapped, private, "d" * 32, "a" * 64) == KEY
    assert wrap_key(KEY, public, "d" * 32, "a" * 64) != wrapped
    flipped = wrapped[:-1] + bytes([wrapped[-1] ^ 1])
    for attempt in (
        (wrapped, pair()[0], "d" * 32, "a" * 64),
        (wrapped, private, "e" * 32, "a" * 64),
        (wrapped, private, "d" * 32, "b" * 64),
        (flipped, private, "d" * 32, "a" * 64),
        (wrapped[:-1], private, "d" * 32, "a" * 64),
        (b"", private, "d" * 32, "a" * 64),
        (bytes(80), private, "d" * 32, "a" * 64),
    ):
        with pytest.raises(SealError):
            unwrap_key(*attempt)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33)])
def test_it_refuses_a_key_of_another_length(key):
    with pytest.raises(ContractError):
        wrap_key(KEY, key, "d" * 32, "a" * 64)
    with pytest.raises(ContractError):
        wrap_key(key, pair()[1], "d" * 32, "a" * 64)
    with pytest.raises(ContractError):
        list(seal(key, "plan", "a" * 64, [b""]))


# --- manifests that name both forms ---------------------------------------------------------------


def test_it_reads_a_manifest_of_sealed_sections():
    bundle = sealed_toy(toy_bundle(ToySpec()), KEY)
    manifest = parse_manifest(bundle.manifest_bytes)
    assert manifest == bundle.manifest
    assert manifest.is_sealed
    assert b"sparsefleet.release/2" in bundle.manifest_bytes
    section = manifest.section("plan")
    assert section.travels == section.sealed
    assert Section("plan", 3, "ab" * 32).travels == Sealed(3, "ab" * 32)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"sparsefleet.release/2", b"sparsefleet.release/1"),
        (b"sparsefleet.release/2", b"sparsefleet.release/3"),
        (b'"sealed":{', b'"sealed":{"x":1,'),
    ],
)
def test_it_refuses_a_manifest_that_mixes_the_forms(old, new):
    data = sealed_toy(toy_bundle(ToySpec()), KEY).manifest_bytes
    with pytest.raises(ContractError):
        parse_manifest(data.replace(old, new))


def test_it_refuses_a_sealed_size_that_cannot_be():
    bundle = sealed_toy(toy_bundle(ToySpec()), KEY)
    size = bundle.manifest.section("plan").travels.size_bytes
    wrong = bundle.manifest_bytes.replace(
        b'"size_bytes":%d' % size, b'"size_bytes":%d' % (size - 1)
    )
    with pytest.raises(ContractError):
        parse_manifest(wrong)
