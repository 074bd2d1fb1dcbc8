"""`layoutc bench` where only torch and Triton are: python -m layoutc.bench."""

import sys

from layoutc.bench.measure import main

if __name__ == "__main__":
    sys.exit(main())
