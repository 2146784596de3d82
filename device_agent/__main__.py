"""Entry point: `python -m device_agent`."""

import sys

if __name__ == "__main__":
    try:
        from device_agent.cli import main

        status = main()
    except KeyboardInterrupt:  # before `main` could take it
        status = 130  # as `EXIT_INTERRUPTED`, which may not be loaded yet
    sys.exit(status)
