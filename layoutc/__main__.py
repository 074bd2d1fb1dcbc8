"""The command line, as `python -m layoutc`."""

from layoutc.cli.app import main

if __name__ == "__main__":
    main(prog_name="layoutc")
