"""`python -m compiler`: see `compiler.driver.cli`."""

import sys

if __name__ == "__main__":
    try:
        from compiler.driver.cli import main

        status = main()
    except KeyboardInterrupt:  # before `main` could take it
        status = 130
    sys.exit(status)
