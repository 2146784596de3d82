"""A child whose native runs are counted from outside: a plan with a part of its experts in memory.

python -m tests.simulators.called_pool TARGET SHARE THREADS
"""

import sys
from itertools import islice

from benchmarks.system_calls import marked, wait_for_go
from tests.factories.kernels import Case, ids
from tests.factories.pools import pooled
from tests.integration.test_native_pool import decoder, scheduled

WARM_UP = 30
RUNS = 40


def main(target: str, share: str, threads: str) -> None:
    """Warm up, and run one token at a time between marks."""
    case = Case.of(scheduled(decoder()))
    with pooled(case, target, float(share)) as (plan, _):
        plan.threads = int(threads)
        tokens = ((at * 7) % 50 for at in range(WARM_UP + RUNS))

        def step(token: int) -> None:
            plan.kv_length = min(plan.kv_length, 16)
            inputs = {"token_ids": [token], "positions": [plan.kv_length]}
            plan.run("step", {role: ids(values).tobytes() for role, values in inputs.items()})

        for token in islice(tokens, WARM_UP):
            step(token)
        marked(plan)
        wait_for_go()
        for token in tokens:
            step(token)


if __name__ == "__main__":
    main(*sys.argv[1:])
