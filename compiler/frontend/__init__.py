"""ONNX submissions to IR: `import_pipeline(directory)`."""

from compiler.frontend.importer import import_pipeline
from compiler.passes.base import ImportedPipeline

__all__ = ["ImportedPipeline", "import_pipeline"]
