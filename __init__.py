"""Lets programs beside a checkout named `layoutc` import the package inside it.

Python takes a folder of a package's name beside a program for that package before it looks at installed ones. Without
this file such a folder would be an empty package.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if __name__ == "layoutc":
    inside = Path(__file__).parent / "layoutc"
    spec = spec_from_file_location(__name__, inside / "__init__.py", submodule_search_locations=[str(inside)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{inside} is no package: the checkout is not complete")
    sys.modules[__name__] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
