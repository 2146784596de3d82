"""ONNX submissions to IR: `import_pipeline(directory)`.

What loads ONNX is loaded when it is asked for: reading `pipeline.json` alone must stay cheap.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiler.frontend.importer import import_pipeline
    from compiler.passes.base import ImportedPipeline

__all__ = ["ImportedPipeline", "import_pipeline"]


def __getattr__(name: str) -> object:
    if name == "import_pipeline":
        from compiler.frontend.importer import import_pipeline

        return import_pipeline
    if name == "ImportedPipeline":
        from compiler.passes.base import ImportedPipeline

        return ImportedPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
