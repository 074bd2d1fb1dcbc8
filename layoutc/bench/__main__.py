"""`layoutc bench` on machines with only torch and Triton: python -m layoutc.bench."""

import sys

from layoutc.bench.measure import main

if __name__ == "__main__":
    sys.exit(main())
