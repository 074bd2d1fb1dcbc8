"""Speeds of cards and hosts: the constants of estimates, each with its source.

`tests/bench/fit_steps.py` fits the marked ones to `tests/bench/recorded_steps.py`, and prints residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import sqrt

from layoutc.estimate.links import Link, Links, Rule

LEAST, MOST = 0.1, 3.0  # the range of factors to search; measured hosts had 0.54 to 1.23
DECIDES = 1.05  # a step shorter than this times the card's and the link's time is not host-bound
RESERVED = 4 << 30  # bytes: CUDA's context, NCCL's buffers, cuBLAS's workspaces, gaps of the caching allocator


@dataclass(frozen=True)
class Machine:
    """A card with its host.

    products: FLOP/s by kind of scales ("": no scales), timed alone; in_step: the factor on them within a step.
    attention: FLOP/s. memory: bytes per second. token_bytes: bytes that elementwise work moves per token and column of
    activations. operand_bytes: bytes that quantizing moves per entry of an activation or gradient. interference: of
    products and attention with the link; see `layoutc.estimate.streams`. holds: bytes of memory, as torch reports them.
    within: the link among a host's cards, from `LINKS`. extrapolated: the basis, if nothing was measured on the card.

    Seconds of the host, per step without gathers: group_host per group, weight_host per quantized weight, cast_host per
    weight that is cast; low_host, in eager models, in addition per weight with products in low precision; graph_host:
    the time that compiled graphs save per weight that they dequantize. copied_host: the extra time of FSDP2's own
    reduction of a group's gradients over the one in few steps. Per gather and weight: plain_gather_host in bf16,
    gather_host in a recipe, values_gather_host if the weight is dequantized from the gather's output.
    """

    name: str
    capability: tuple[int, int]
    products: Mapping[str, float]
    in_step: float
    attention: float
    memory: float
    token_bytes: float
    operand_bytes: float
    interference: float
    group_host: float
    weight_host: float
    cast_host: float
    low_host: float
    graph_host: float
    copied_host: float
    plain_gather_host: float
    gather_host: float
    values_gather_host: float
    holds: int
    within: str = "nvlink"
    extrapolated: str = ""

    @property
    def room(self) -> int:
        """Bytes for a model: all but those of CUDA, NCCL and the allocator's gaps."""
        return self.holds - RESERVED

    def with_host(self, factor: float) -> Machine:
        """A copy whose host takes `factor` times as long for everything."""
        hosts = [one.name for one in fields(self) if one.name.endswith("_host")]
        return replace(self, **{name: getattr(self, name) * factor for name in hosts})


# 16,384 tokens, 4096 to 14336, one H200, each product timed alone, fast accumulation off.
PRODUCTS = {
    "": 651e12,
    "TensorWise": 1194e12,
    "RowWise": 1120e12,
    "BlockWise128x128": 1099e12,  # by 1x128
    "BlockWise1x128": 883e12,  # by 1x128
}
H200 = Machine(
    name="H200",
    capability=(9, 0),
    products=PRODUCTS,
    in_step=1.09,  # fitted: the time of products in steps at batch 4
    attention=457e12,  # 33.7 ms of a step at batch 4: 15.4e12 operations; backward has 2.5 times forward's
    memory=4.11e12,  # a copy of 8192 x 8192 in bf16
    token_bytes=16.2,  # fitted to whole steps, like the following ones up to graph_host
    operand_bytes=10.5,
    interference=0.871,
    group_host=6.88e-3,
    weight_host=0.2235e-3,
    cast_host=0.393e-3,
    low_host=0.1985e-3,
    graph_host=0.097e-3,
    copied_host=1.1e-3,  # 8 groups: 14.4 vs. 5.8 ms on the H200s' host, 11.9 vs. 3.0 ms on the H100s', by py-spy
    plain_gather_host=348e-6 / 7,  # measured, seven weights on two ranks
    gather_host=348e-6 * 378 / 622 / 7,  # ratio of H100s: 338, 398 and 399 us; bf16 took 622
    values_gather_host=348e-6 * 368 / 1091 / 7,  # ratio of H100s: 391, 354 and 358 us; bf16 took 1091
    holds=150_110_011_392,
)

# Compute and links are an H200's; bf16 copies reach 2.87 to 2.90 TB/s of memory bandwidth.
H100 = replace(H200, name="H100", memory=2.89e12, holds=85_017_493_504)

# Scaled by the vendor's figures, B200 vs. H200: dense products (bf16 2,250 and 989 TFLOP/s; FP8 4,500 and 1,979; FP4
# 9,000), memory (8.0 and 4.8 TB/s), NVLink (900 and 450 GB/s). Products with block scales are assumed to reach the same
# share of the FP8 and FP4 peaks as tensorwise FP8 on an H200. The host is an H200's.
_FASTER, _FP8 = 2250 / 989, PRODUCTS["TensorWise"] * 4500 / 1979
B200 = replace(
    H200,
    name="B200",
    capability=(10, 0),
    products={
        "": PRODUCTS[""] * _FASTER,
        **{"TensorWise": _FP8, "RowWise": PRODUCTS["RowWise"] * _FASTER},
        **{"BlockWise1x32": _FP8, "BlockWise1x16": 2 * _FP8},
    },
    attention=457e12 * _FASTER,
    memory=4.11e12 * 8.0 / 4.8,
    holds=191_500_000_000,
    within="nvlink-5",
    extrapolated="the vendor's figures beside an H200's: no step was measured on it",
)
CARDS = {"h100": H100, "h200": H200, "b200": B200}

# NCCL's latency per ring step, src/graph/tuning.cc at 01afd20 (Simple): 3.4 us over NVLink, 9.6 us over a network.
NCCL_HOP, NCCL_FAR_HOP = 3.4e-6, 9.6e-6
# Fitted to a step's gathers on two H200s: 15.3, 8.0, 8.1 and 4.8 ms over NVLink; 369, 189, 185, 188 and 97 ms over
# sockets.
# The share for reduce-scatters is the one over sockets (390.5 ms); none was recorded over NVLink.
NVLINK = Link("NVLink", 256e9, 78e-6, NCCL_HOP, reduced=0.93)
# NVLink among four H200s: the bandwidth is fitted to one bf16 gather timed alone, 1.139 ms.
NVLINK_4 = replace(NVLINK, bandwidth=311e9)
SOCKETS = Link("sockets", 9.68e9, 364e-6, NCCL_HOP, reduced=0.93, exchanged=0.70)
# Through the host's memory (NCCL_P2P_DISABLE=1), measured by `tests/bench/links.py`, with the share for exchanges over
# sockets. Concurrent products hardly slow it: estimates of six steps are 11 to 23% too long with full interference, and
# 2 to 7% too short without.
HOST_MEMORY = Link("host memory", 25.3e9, 45e-6, NCCL_HOP, exchanged=0.96, disturbed=0.0)
NVLINK_5 = replace(NVLINK, name="NVLink 5", bandwidth=2 * NVLINK.bandwidth)
LINKS = {"nvlink": NVLINK, "nvlink-5": NVLINK_5, "host-memory": HOST_MEMORY, "sockets": SOCKETS}


def link_of(link: float | str) -> Link:
    """A measured link by name, or another by bytes per second, with NVLink's launch time and sockets' share."""
    if isinstance(link, str):
        return LINKS[link]
    return Link(f"{link / 1e9:g} GB/s", link, NVLINK.launch, NCCL_HOP, reduced=SOCKETS.reduced)


def links_of(
    across: float | str,
    within: float | str = "nvlink",
    per_host: int = 8,
    far_hop: float | None = None,
    rule: Rule = "ring",
) -> Links:
    """Both links of a card, each by name or by bytes per second."""
    far = replace(link_of(across), hop=NCCL_FAR_HOP if far_hop is None else far_hop)
    return Links(link_of(within), far, per_host, rule)


def factor_of(seconds: float, machine: Machine, step: Callable[[Machine], float]) -> float:
    """The host time relative to `machine`'s host, on a host where a bf16 step takes `seconds`. Hosts with equal cards
    differed by more than 2x; all host times scale with that of bf16.

    step: estimates that step's seconds for a machine; never decreases with a slower host. Raises ValueError if the step
    is not host-bound, or if no factor from 0.1 to 3 yields it.
    """
    others, slowest = step(machine.with_host(LEAST)), step(machine.with_host(MOST))
    if seconds < DECIDES * others:
        raise ValueError(
            f"the card and the link take {others * 1e3:.1f} ms of a step in bf16, so {seconds * 1e3:g} ms says "
            "nothing of the host: give a step of fewer tokens, or none"
        )
    if seconds > slowest:
        raise ValueError(
            f"{seconds * 1e3:g} ms is longer than the {slowest * 1e3:.1f} ms of a host that is {MOST:g} times as slow"
            " as those that were measured: is it of this model, of these ranks and this link, and compiled or eager?"
        )
    low, high = LEAST, MOST
    for _ in range(40):
        middle = sqrt(low * high)
        low, high = (middle, high) if step(machine.with_host(middle)) < seconds else (low, middle)
    return high
