"""When a run-time check of likely zeros pays: how many groups may be live for it to be worth it.

`CheckZeros` and `compiler.quant.checks` ask. Measured (x86-64-v3, LINEAR of 128 to 1,024 rows over
256 to 2,048 columns, 1 and 8 activation rows, interleaved): reading the listed groups of a dense
weight takes as long per group as reading all of them, and as long as dense at 15 of 16 groups; a
check that fails costs at most 5 % from 8 groups on, because it stops at the first group too many.
"""

from typing import Final

from compiler.contract.tiles import GROUP, MAX_GROUPS

FEWEST_GROUPS: Final = 8
"""Below this a call is too short for a check to pay."""


def checked_groups(cols: int) -> int:
    """Return how many groups of 32 columns may be live for a sparse path; 0 = check nothing."""
    groups = -(-cols // GROUP)
    return groups * 7 // 8 if FEWEST_GROUPS <= groups <= MAX_GROUPS else 0
