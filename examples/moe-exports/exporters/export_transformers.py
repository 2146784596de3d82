"""Export MoE blocks of the `transformers` library to ONNX, as its users do.

Needs the packages of `requirements-exporters.lock`, which Sparsefleet itself does not:

    python export_transformers.py DIRECTORY [FAMILY ...]

Each family gives three files: the eager experts traced by TorchScript (`eager_ts`, a loop over the
experts that the example input hit), and the `batched_mm` experts by both exporters. `trap.onnx` is
the eager loop of 16 experts, traced with 64 tokens that hit 15 of them. Weights are random, seeded
by the file's name, so that a file is the same whatever else is written; sizes are the least that
keep every structure (model width 32, 4 or 8 experts, two of them chosen). What exporters note about
the machine they ran on is left out.
"""

import itertools
import logging
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers

WIDTH = 32
TRAP_EXPERTS, TRAP_TOKENS = 16, 64
COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", LOCAL),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**QWEN, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**QWEN, "head_dim": 8, "decoder_sparse_step": 1}),
    "phimoe": ("PhimoeConfig", LOCAL),
    "gpt_oss": ("GptOssConfig", {**LOCAL, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
    "granitemoe": ("GraniteMoeConfig", LOCAL),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
}


class Block(torch.nn.Module):
    """One MoE block, rows in and rows out."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.b = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mixture of x (1, s, WIDTH)."""
        y = self.b(x)
        return y[0] if isinstance(y, tuple) else y


def block_of(config: str, sizes: dict[str, Any], experts: str) -> Block:
    """Build a model with random weights and return its first MoE block."""
    made = getattr(transformers, config)(**{**COMMON, **sizes})
    made._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    model.set_experts_implementation(experts)
    names = (".mlp", ".block_sparse_moe")
    return Block(next(m for n, m in model.named_modules() if n.endswith(names))).eval()


def rows(tokens: int) -> torch.Tensor:
    """Return random example rows (1, tokens, WIDTH)."""
    return torch.randn(1, tokens, WIDTH)


def traced(block: Block, path: Path, x: torch.Tensor | None = None) -> None:
    """Export by TorchScript tracing of x."""
    torch.onnx.export(
        block,
        (rows(6) if x is None else x,),
        path,
        dynamo=False,
        opset_version=17,
        input_names=["x"],
        dynamic_axes={"x": {1: "s"}},
    )


def captured(block: Block, path: Path) -> None:
    """Export by torch.export ("dynamo")."""
    length = torch.export.Dim("s", min=2, max=64)
    torch.onnx.export(
        block,
        (rows(6),),
        path,
        dynamo=True,
        dynamic_shapes={"x": {1: length}},
        external_data=False,
        verbose=False,
    )


def exports(family: str) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield (file name, writer) of a family."""
    config, sizes = FAMILIES[family]
    kinds: list[tuple[str, str, Callable[[Block, Path], None]]] = [
        ("eager", "ts", traced),
        ("batched_mm", "ts", traced),
        ("batched_mm", "dynamo", captured),
    ]
    for experts, exporter, write in kinds:

        def writer(
            path: Path, experts: str = experts, write: Callable[[Block, Path], None] = write
        ) -> None:
            write(block_of(config, sizes, experts), path)

        yield f"exp_{family}_{experts}_{exporter}.onnx", writer


def hit(block: Block, x: torch.Tensor) -> int:
    """Return how many experts of a block the rows of x choose."""
    logits = x.reshape(-1, WIDTH) @ block.b.gate.weight.T
    return len(logits.topk(block.b.gate.top_k).indices.unique())


def trap(path: Path) -> None:
    """Trace a loop over experts with rows that hit all but one."""
    config, sizes = FAMILIES["qwen3_moe"]
    block = block_of(config, {**sizes, "num_experts": TRAP_EXPERTS}, "eager")
    draws = (rows(TRAP_TOKENS) for _ in itertools.count())
    traced(block, path, next(x for x in draws if hit(block, x) == TRAP_EXPERTS - 1))


def without_notes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Drop metadata and documentation: exporters put stack traces with folders there."""
    graph = model.graph
    parts = [model, graph, *graph.node, *graph.initializer]
    for part in [*parts, *graph.input, *graph.output, *graph.value_info]:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return model


def write(path: Path, export: Callable[[Path], None]) -> None:
    """Write one file."""
    torch.manual_seed(zlib.crc32(path.name.encode()))
    export(path)
    onnx.save(without_notes(onnx.load(path)), path)
    print(path.name)


def main(directory: Path, families: list[str]) -> None:
    """Write the files of some families, or of all and the trap."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    directory.mkdir(parents=True, exist_ok=True)
    for family in families or FAMILIES:
        for name, export in exports(family):
            write(directory / name, export)
    if not families:
        write(directory / "trap.onnx", trap)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
