"""Random bits for stochastic rounding: Philox 4x32-10, keyed by a seed. Plain torch, any device.

They depend only on the seed, the element's row and column, and the orientation. Source: Salmon et al., Parallel Random
Numbers: As Easy as 1, 2, 3 (SC 2011), with the same constants as `tl.philox` in kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

Seed = int | Tensor
_MASK, _WIDE = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_RAISE = 0x9E3779B9, 0xBB67AE85  # added to the key after each round
_ROUNDS = 10
WORDS = 4  # 32-bit words per counter


def draw_seed(x: Tensor) -> Tensor:
    """A seed from torch's default generator of x's device: (1,) int64, there. `torch.manual_seed` reproduces it."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=x.device)


def seed_tensor(seed: Seed, device: torch.device) -> Tensor:
    """A caller's seed as (1,) int64 on a device. Raises TypeError or ValueError for an invalid seed."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"seed must be an int, or an int64 tensor of one element, not {seed.dtype} of shape {tuple(seed.shape)}"
            )
        return seed.detach().reshape(1).to(device)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, or an int64 tensor of one element, not {type(seed).__name__}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit into 64 bits with a sign, but {seed} does not")
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def seed_of(*numbers: int) -> int:
    """Mixes 64-bit numbers into a signed 64-bit seed, by one SplitMix64 step per number."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _WIDE
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WIDE
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WIDE
        state ^= state >> 31
    return state - (1 << 64) if state >> 63 else state


def random_bits(seed: Tensor, m: int, k: int, stream: int) -> Tensor:
    """32 random bits for each element of an (m, k) matrix: int64, from 0 to 2^32 - 1.

    The counter (column // 4, row, stream, 0) gives four words; the element uses word column % 4. The key: the seed.
    """
    device = seed.device
    groups = -(-k // WORDS)
    zeros = torch.zeros(m, groups, dtype=torch.int64, device=device)
    words = [
        zeros + torch.arange(groups, device=device),
        zeros + torch.arange(m, device=device)[:, None],
        zeros + stream,
        zeros,
    ]
    return torch.stack(counted_words(words, seed & _MASK, (seed >> 32) & _MASK), dim=-1).view(m, groups * WORDS)[:, :k]


def counted_words(words: list[Tensor], low: Seed, high: Seed) -> list[Tensor]:
    """Philox's four output words for a counter of four words and a key of two, all int64 from 0 to 2^32 - 1.

    Each of ten rounds multiplies two of the words, and mixes the products with the other two and the key.
    """
    c0, c1, c2, c3 = words
    for _ in range(_ROUNDS):
        (high0, low0), (high2, low2) = _multiply(_MULTIPLIERS[0], c0), _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ low, low2, high0 ^ c3 ^ high, low0
        low, high = (low + _RAISE[0]) & _MASK, (high + _RAISE[1]) & _MASK
    return [c0, c1, c2, c3]


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of a product of unsigned 32-bit numbers, which would overflow int64."""
    lower = a * (b & 0xFFFF)
    upper = a * (b >> 16) + (lower >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)
