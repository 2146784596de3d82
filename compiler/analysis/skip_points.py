"""Measured gains of leaving out dead neurons: what `compiler.quant.neurons` chooses by.

One row per share of dead gates: how many times faster than the dense layer a routed ReGLU layer is
with up rows and columns one by one, with up rows alone, and with columns alone. Eight experts of
1024-4096, top 2, one token, cold weights, one thread, x86-64-v4-vnni, medians of turns on a shared
machine (`benchmarks.kernels_skip`, the same layer in each storage). Between rows a gain is
interpolated; where it falls below one, skipping costs more than it saves: reading single neurons
gets a third of the bandwidth of a stream.
"""

from typing import Final

DEAD: Final = (0.5, 0.6, 0.7, 0.8, 0.9)
BOTH: Final = (0.83, 0.96, 1.09, 1.22, 1.50)
UP_ROWS: Final = (0.89, 0.94, 1.01, 1.05, 1.21)
COLUMNS: Final = (0.85, 0.91, 1.01, 1.09, 1.31)
