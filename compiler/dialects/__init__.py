"""The compiler's IR: dialects `sp` (tensors), `moe`, `mm` (vision, language), `hw` (kernels)."""
