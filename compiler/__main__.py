"""`python -m compiler`: see `compiler.driver.cli`."""

import sys

from compiler.driver.cli import main

if __name__ == "__main__":
    sys.exit(main())
