"""Entry point: `python -m device_agent`."""

import sys

from device_agent.cli import main

sys.exit(main())
