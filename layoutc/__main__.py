"""python -m layoutc."""

from layoutc.cli import main

if __name__ == "__main__":
    main(prog_name="layoutc")
