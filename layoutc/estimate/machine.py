"""What a card and a host do in a second: the constants that estimates are made of, each with its source.

`tests/bench/fit_steps.py` fits those that say so to the steps of `tests/bench/recorded_steps.py`, and prints the points
and the residuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from layoutc.estimate.links import Link, Links, Rule

RESERVED = 4 << 30  # bytes: CUDA's context, NCCL's buffers, cuBLAS's workspaces, gaps of the caching allocator


@dataclass(frozen=True)
class Machine:
    """A card with its host.

    products: operations a second by kind of scales ("": no scales), as timed alone; in_step: what they reach in a step,
    as a factor. attention: operations a second. memory: bytes a second. token_bytes: bytes that elementwise work moves
    for each token and each column of activations. operand_bytes: bytes that quantizing moves for each entry of an
    activation or a gradient. interference: of products and attention with the link; see `layoutc.estimate.streams`.
    holds: bytes of its memory, as torch reports them. within: the link among cards of a host, of `LINKS`.
    extrapolated: by what, if nothing was measured on it.

    Seconds of the host: group_host, weight_host, cast_host, of a group, of each quantized weight and each weight that
    is cast, in a step without its gathers; low_host: besides of each whose products are in low precision, in eager
    models; graph_host: what compiled graphs take less of each that they dequantize.
    copied_host: what FSDP2's own reduction of a group's gradients takes more of it than that in few steps.
    plain_gather_host, gather_host: of a weight in each gather, in bf16 and in a recipe. values_gather_host: of one
    whose values are made where all of the group's codes have arrived.
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
        """Bytes for a model: all but what CUDA, NCCL and the allocator's gaps take."""
        return self.holds - RESERVED

    def with_host(self, factor: float) -> Machine:
        """The same with a host that takes `factor` times as long for everything."""
        hosts = [one.name for one in fields(self) if one.name.endswith("_host")]
        return replace(self, **{name: getattr(self, name) * factor for name in hosts})


# 16,384 tokens, 4096 to 14336, one H200, each product by itself, fast accumulation off.
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
    in_step=1.09,  # fitted: what products take of steps at batch 4
    attention=457e12,  # 33.7 ms of a step at batch 4: 15.4e12 operations, of which backward has 2.5 times forward's
    memory=4.11e12,  # a copy of 8192 x 8192 in bf16
    token_bytes=16.2,  # fitted, as what follows up to graph_host: whole steps
    operand_bytes=10.5,
    interference=0.871,
    group_host=6.88e-3,
    weight_host=0.2235e-3,
    cast_host=0.393e-3,
    low_host=0.1985e-3,
    graph_host=0.097e-3,
    copied_host=1.1e-3,  # 8 groups: 14.4 ms and 5.8 of H200s' host; 11.9 and 3.0 of H100s', py-spy's shares
    plain_gather_host=348e-6 / 7,  # as measured, seven weights on two ranks
    gather_host=348e-6 * 378 / 622 / 7,  # as H100s had it: 338, 398 and 399 us, where bf16 took 622
    values_gather_host=348e-6 * 368 / 1091 / 7,  # as H100s had it: 391, 354 and 358 us, where bf16 took 1091
    holds=150_110_011_392,
)

# Its compute and its links are an H200's; its memory carries 2.87 to 2.90 TB/s in copies of bf16.
H100 = replace(H200, name="H100", memory=2.89e12, holds=85_017_493_504)

# By the vendor's figures of dense products (bf16 2,250 TFLOP/s, an H200's 989; FP8 4,500 and 1,979; FP4 9,000), of
# memory (8.0 TB/s and 4.8) and of NVLink (900 GB/s and 450). Products with block scales are taken to reach as much of
# FP8's and FP4's as those under one scale do on an H200. The host is an H200's.
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

# NCCL's latencies of a ring's steps, src/graph/tuning.cc at 01afd20 (Simple): 3.4 us by NVLink, 9.6 us by a network.
NCCL_HOP, NCCL_FAR_HOP = 3.4e-6, 9.6e-6
# Fitted to the gathers of a step on two H200s: 15.3, 8.0, 8.1 and 4.8 ms by NVLink, 369, 189, 185, 188 and 97 ms over
# sockets.
# The share of reduce-scatters is that over sockets (390.5 ms); over NVLink none was recorded.
NVLINK = Link("NVLink", 256e9, 78e-6, NCCL_HOP, reduced=0.93)
# The same among four, whose bandwidth is fitted to one gather in bf16 by itself: 1.139 ms.
NVLINK_4 = replace(NVLINK, bandwidth=311e9)
SOCKETS = Link("sockets", 9.68e9, 364e-6, NCCL_HOP, reduced=0.93, exchanged=0.70)
# Through the host's memory (NCCL_P2P_DISABLE=1), as `tests/bench/links.py` measures it, and the share of exchanges over
# sockets. What it does beside products hardly slows it: with all of the interference six steps would be 11 to 23% too
# long, without it they are 2 to 7% too short.
HOST_MEMORY = Link("host memory", 25.3e9, 45e-6, NCCL_HOP, exchanged=0.96, disturbed=0.0)
NVLINK_5 = replace(NVLINK, name="NVLink 5", bandwidth=2 * NVLINK.bandwidth)
LINKS = {"nvlink": NVLINK, "nvlink-5": NVLINK_5, "host-memory": HOST_MEMORY, "sockets": SOCKETS}


def link_of(link: float | str) -> Link:
    """One that was measured, by name; or of so many bytes a second, which was not: with the launch of NVLink's
    collectives, and the share of reduce-scatters over sockets."""
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
    """Both links of a card, each by name or of so many bytes a second."""
    far = replace(link_of(across), hop=NCCL_FAR_HOP if far_hop is None else far_hop)
    return Links(link_of(within), far, per_host, rule)
