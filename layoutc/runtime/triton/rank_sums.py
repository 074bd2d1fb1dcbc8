"""A Triton kernel that adds up what ranks have sent, in fp32 and in the order of ranks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rank_sum_kernel(parts, out, numel, ranks, divisor, TILE: tl.constexpr):
    """out[i] = (parts[0, i] + parts[1, i] + ...) / divisor. parts: (ranks, numel), contiguous; out: fp32."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    total = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for _ in range(1, ranks):
        parts += numel
        total += tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, tl.div_rn(total, tl.full((TILE,), 0.0, tl.float32) + divisor), mask=inside)
