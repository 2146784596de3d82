"""The reference interpreter of a lowered module: bit-exact, or in f64 without quantisation."""

from compiler.simulator.machine import Simulator

__all__ = ["Simulator"]
