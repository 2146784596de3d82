"""Export MoE blocks of the `transformers` library to ONNX, as its users do.

Needs torch, transformers and onnx, which Sparsefleet itself does not:

    python export_transformers.py DIRECTORY [FAMILY ...]

Each family gives three files: the eager experts traced by TorchScript (`eager_ts`, a loop over the
experts that the example input hit), and the `batched_mm` experts by both exporters. `trap.onnx` is
the eager loop of 16 experts, traced with 64 tokens. Weights are random; sizes are the least that
keep every structure (model width 32, 4 or 8 experts, two of them chosen).
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

WIDTH = 32
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


def traced(block: Block, path: Path, tokens: int = 6) -> None:
    """Export by TorchScript tracing."""
    torch.onnx.export(
        block,
        (torch.randn(1, tokens, WIDTH),),
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
        (torch.randn(1, 6, WIDTH),),
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


def trap(path: Path) -> None:
    """Trace a loop over 16 experts of which 64 tokens hit some."""
    config, sizes = FAMILIES["qwen3_moe"]
    traced(block_of(config, {**sizes, "num_experts": 16}, "eager"), path, tokens=64)


def main(directory: Path, families: list[str]) -> None:
    """Write the files of some families, or of all and the trap."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    directory.mkdir(parents=True, exist_ok=True)
    for family in families or FAMILIES:
        for name, write in exports(family):
            write(directory / name)
            print(name)
    if not families:
        trap(directory / "trap.onnx")
        print("trap.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
