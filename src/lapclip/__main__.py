"""`lapclip`, and `python -m lapclip`."""

import sys


def main() -> None:
    """Imports and runs the command line; Ctrl-C during the import exits as it does later."""
    try:
        from lapclip.cli import run_command
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
