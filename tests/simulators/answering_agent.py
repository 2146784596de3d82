"""An agent in a process of its own, with the real engine, that answers while it updates.

    python -m tests.simulators.answering_agent SERVER_URL STATE_DIR EVALUATION QUESTIONS

Prints a line per answer, `MANIFEST QUESTION WORDS...`, the number of the question in the set; it
runs until it is killed.
"""

import sys
import threading
import time
from pathlib import Path

from device_agent.agent import Agent
from device_agent.config import AgentConfig
from device_agent.errors import AgentError, NoBundleError
from device_agent.runtime.evaluation import load_evaluation

PAUSE_S = 0.002


def answer(agent: Agent, evaluation: Path, count: int) -> None:
    questions = load_evaluation(evaluation).questions[:count]
    while True:
        for number, question in enumerate(questions):
            try:
                record = agent.host.answer(question)
            except NoBundleError:
                print("nobody", flush=True)
                continue
            end = "" if not record.failed else f" {record.outcome}"
            print(record.manifest_sha256, number, " ".join(record.words) + end, flush=True)
            time.sleep(PAUSE_S)


def main(server_url: str, state_dir: Path, evaluation: Path, count: int) -> None:
    config = AgentConfig(
        server_url=server_url,
        state_dir=state_dir,
        serial="victim",
        model="edgecard",
        poll_s=0.02,
        probation_s=0.1,
        answer_timeout_s=60.0,
        activation_tries=1_000_000,
        retry_first_s=0.01,
        retry_most_s=0.05,
        reserve_bytes=0,
        steering="off",
    )
    agent = Agent(config)
    loop = agent.boot()
    threading.Thread(target=answer, args=(agent, evaluation, count), daemon=True).start()
    while True:
        try:
            wait_s = loop.turn()
        except AgentError:
            wait_s = 0.05
        time.sleep(min(wait_s, 0.02))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
