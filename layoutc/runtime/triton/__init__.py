"""The Triton functions that generated kernels call, imported there as `lt`."""

# ruff: noqa: F403

from __future__ import annotations

from layoutc.runtime.triton.blocks import *
from layoutc.runtime.triton.codebooks import *
from layoutc.runtime.triton.codes import *
from layoutc.runtime.triton.conversions import *
from layoutc.runtime.triton.hadamard import *
from layoutc.runtime.triton.nibbles import *
from layoutc.runtime.triton.stochastic import *
from layoutc.runtime.triton.swizzles import *
from layoutc.runtime.triton.tiles import *
from layoutc.runtime.triton.transposes import *
from layoutc.runtime.triton.units import *
