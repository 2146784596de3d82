"""A process that applies no delta: it does what the file `mode` in the state folder says.

hang   sleeps for ever      segv   dies by a signal
exit   ends with status 9   half   leaves half an object behind, then dies
"""

import os
import signal
import sys
import time
from pathlib import Path


def main(state_dir: Path) -> None:
    mode = (state_dir / "mode").read_text()
    if mode == "hang":
        time.sleep(600)
    elif mode == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif mode == "exit":
        sys.stderr.write("something broke\n")
        sys.exit(9)
    elif mode == "half":
        for path in (state_dir / "objects").iterdir():
            (state_dir / "partial" / path.name).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
