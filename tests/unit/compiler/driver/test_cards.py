"""Cards: the format of calibration and evaluation sets, and what breaks it."""

import io
import json
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from compiler.contract.pipeline import ImageSpec
from compiler.driver import cards as cards_module
from compiler.driver.cards import Question, read_cards, require_sets
from compiler.errors import MalformedModelError

SPEC = ImageSpec(2, 3, 1)
IMAGES = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
QUESTION = {"kind": "k", "prompt": "question", "words": ["what"], "answer": ["a", "b"]}
DOCUMENT = {
    "schema": "sparsefleet.cards/1",
    "images": "evaluation.npz",
    "cards": [{"image": 1, "questions": [QUESTION]}, {"image": 0, "questions": []}],
}


def _write(directory, document=DOCUMENT, images=IMAGES):
    (directory / "evaluation.json").write_text(json.dumps(document))
    np.savez_compressed(directory / "evaluation.npz", images=images)
    return directory


def test_it_reads_pictures_and_questions(tmp_path) -> None:
    first, second = read_cards(_write(tmp_path), "evaluation", SPEC)
    assert first.image == bytes(range(6, 12))
    assert first.questions == (Question("k", "question", ("what",), ("a", "b")),)
    assert (second.image, second.questions) == (bytes(range(6)), ())


def test_it_reads_coloured_pictures(tmp_path) -> None:
    _write(tmp_path, images=np.zeros((2, 2, 3, 3), np.uint8))
    assert len(read_cards(tmp_path, "evaluation", ImageSpec(2, 3, 3))[0].image) == 18


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "sparsefleet.cards/2"},
        {"images": "../evaluation.npz"},
        {"cards": {}},
        {"cards": [{"image": 2, "questions": []}]},
        {"cards": [{"image": -1, "questions": []}]},
        {"cards": [{"image": 0}]},
        {"cards": [{"image": 0, "questions": [QUESTION | {"words": "what"}]}]},
        {"cards": [{"image": 0, "questions": [QUESTION | {"words": [""]}]}]},
        {"cards": [{"image": 0, "questions": [QUESTION | {"more": 1}]}]},
        {"more": 1},
    ],
)
def test_it_refuses_a_broken_document(tmp_path, change) -> None:
    with pytest.raises(MalformedModelError, match="evaluation set"):
        read_cards(_write(tmp_path, DOCUMENT | change), "evaluation", SPEC)


@pytest.mark.parametrize(
    "images", [IMAGES.astype(np.float32), IMAGES[:, :1], IMAGES[0], np.array(["x"], dtype=object)]
)
def test_it_refuses_pictures_of_another_shape_or_type(tmp_path, images) -> None:
    with pytest.raises(MalformedModelError):
        read_cards(_write(tmp_path, images=images), "evaluation", SPEC)


def test_it_refuses_missing_and_torn_files(tmp_path) -> None:
    with pytest.raises(MalformedModelError) as caught:
        read_cards(tmp_path, "evaluation", SPEC)
    assert "evaluation.json" in caught.value.hint
    path = _write(tmp_path) / "evaluation.npz"
    whole = path.read_bytes()
    for data in (b"", b"not a zip", whole[:60], whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(MalformedModelError):
            read_cards(tmp_path, "evaluation", SPEC)


def test_it_never_takes_altered_bytes_for_pictures(tmp_path) -> None:
    good = read_cards(_write(tmp_path), "evaluation", SPEC)
    path = tmp_path / "evaluation.npz"
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        torn = bytearray(whole)
        torn[at] ^= 0x55
        path.write_bytes(torn)
        try:
            assert read_cards(tmp_path, "evaluation", SPEC) == good
        except MalformedModelError:
            refused += 1
    assert refused > len(whole) // 6


def test_it_refuses_a_bomb_before_unpacking_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cards_module, "MAX_IMAGE_BYTES", 11)
    with pytest.raises(MalformedModelError, match="unpacks to"):
        read_cards(_write(tmp_path), "evaluation", SPEC)


def _array(shape, dtype="|u1", body=bytes(12), version=b"\1\0") -> bytes:
    """Return a member of an archive whose header says what it likes."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + body


def _archive(*members, method=zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return stream.getvalue()


def _locked(data: bytes) -> bytes:
    """Return an archive that says that it needs a password."""
    changed = bytearray(data)
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        changed[changed.find(mark) + offset] |= 1
    return bytes(changed)


def _torn(data: bytes) -> bytes:
    changed = bytearray(data)
    start = data.find(b"images.npy") + 16
    changed[start : start + 14] = bytes(byte ^ 0x5A for byte in data[start : start + 14])
    return bytes(changed)


GOOD = ("images.npy", _array((2, 2, 3)))
HOSTILE = {
    "a shape of terabytes": _archive(("images.npy", _array((1 << 40, 2, 3)))),
    "a shape beyond 64 bits": _archive(("images.npy", _array((1 << 62, 2, 3)))),
    "a negative shape": _archive(("images.npy", _array((-2, 2, 3)))),
    "fewer bytes than its shape": _archive(("images.npy", _array((3, 2, 3)))),
    "more bytes than its shape": _archive(("images.npy", _array((1, 2, 3)))),
    "a pickle": _archive(("images.npy", _array((1, 2, 3), "|O", b"cos\nsystem\n."))),
    "no header": _archive(("images.npy", _array("[]:1"))),
    "a header of gigabytes": _archive(("images.npy", _array((2, 2, 3), version=b"\2\0"))),
    "another member": _archive(("images", _array((2, 2, 3)))),
    "a password": _locked(_archive(GOOD)),
    "torn bzip2": _torn(_archive(GOOD, method=zipfile.ZIP_BZIP2)),
    "torn lzma": _torn(_archive(GOOD, method=zipfile.ZIP_LZMA)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_it_refuses_hostile_archives(tmp_path, what) -> None:
    _write(tmp_path)
    (tmp_path / "evaluation.npz").write_bytes(HOSTILE[what])
    with pytest.raises(MalformedModelError, match="evaluation set") as caught:
        read_cards(tmp_path, "evaluation", SPEC)
    assert caught.value.hint


def test_it_reads_the_member_whose_size_it_has_checked(tmp_path) -> None:
    _write(tmp_path)
    data = _archive(("images", b"not pictures"), ("images.npy", _array((2, 2, 3))))
    (tmp_path / "evaluation.npz").write_bytes(data)
    assert [card.image for card in read_cards(tmp_path, "evaluation", SPEC)] == [bytes(6)] * 2


def test_it_reads_pictures_in_either_order(tmp_path) -> None:
    expected = read_cards(_write(tmp_path), "evaluation", SPEC)
    found = read_cards(_write(tmp_path, images=np.asfortranarray(IMAGES)), "evaluation", SPEC)
    assert found == expected


def test_it_names_a_missing_file_without_its_folder(tmp_path) -> None:
    with pytest.raises(MalformedModelError, match=r"evaluation\.json") as caught:
        read_cards(tmp_path, "evaluation", SPEC)
    assert str(tmp_path) not in str(caught.value)
    (_write(tmp_path) / "evaluation.npz").unlink()
    with pytest.raises(MalformedModelError, match=r"evaluation\.npz") as caught:
        read_cards(tmp_path, "evaluation", SPEC)
    assert str(tmp_path) not in str(caught.value)


def test_it_checks_both_sets_of_a_model_with_pictures(tmp_path, monkeypatch) -> None:
    image = SimpleNamespace(size=SPEC)
    monkeypatch.setattr(cards_module, "read_pipeline", lambda _folder: SimpleNamespace(image=image))
    with pytest.raises(MalformedModelError, match="calibration set"):
        require_sets(tmp_path)
    calibration = DOCUMENT | {"images": "calibration.npz"}
    (tmp_path / "calibration.json").write_text(json.dumps(calibration))
    np.savez_compressed(tmp_path / "calibration.npz", images=IMAGES)
    require_sets(tmp_path)
    (tmp_path / "evaluation.json").write_text("[1,2]")
    with pytest.raises(MalformedModelError, match="evaluation set"):
        require_sets(tmp_path)
    require_sets(_write(tmp_path))
