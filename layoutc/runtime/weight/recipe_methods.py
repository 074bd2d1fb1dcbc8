"""What the classes of recipes are generated with: the arithmetic and the cuts of one recipe, on plain planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


class Generated:
    """Methods that each generated tensor class has. x: (m, k), fp32, bf16 or fp16; planes by their names."""

    @staticmethod
    def _matrix_values(planes: Mapping[str, Tensor], m: int, k: int, orientation: str, dtype: torch.dtype) -> Tensor:
        """The (m, k) values of an orientation, from planes: computed in fp32, rounded once to `dtype`."""
        raise NotImplementedError

    @staticmethod
    def _lay_out(
        planes: Mapping[str, Tensor], m: int, k: int, orientations: tuple[str, ...], swizzled: bool = False
    ) -> dict[str, Tensor]:
        """The buffers of orientations, from planes; what equals a plane is that plane."""
        raise NotImplementedError

    @classmethod
    def _quantize_buffers(cls, x: Tensor, amax: Any, orientations: tuple[str, ...], swizzled: bool) -> Any:
        """The buffers of an (m, k) matrix in one launch; None: nothing is done, as there is no such kernel."""
        return None

    @classmethod
    def _quantize_matrix(
        cls, x: Tensor, amax: Tensor | None, orientations: Sequence[str], out: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The planes of (m, k) values: those of `out` where a kernel can write into them, else new ones."""
        raise NotImplementedError

    @classmethod
    def _quantize_group(
        cls, xs: Tensors, amaxes: Tensors | None, orientations: Sequence[str], outs: Sequence[Mapping[str, Tensor]]
    ) -> bool:
        """As _quantize_matrix for each of xs, in few launches; False: nothing is done, as there are no such kernels."""
        return False

    @classmethod
    def _shared_amax(cls, x: Tensor) -> Tensor:
        """What shards must agree on before they quantize, for recipes that share an amax."""
        raise NotImplementedError

    @staticmethod
    def _cut(planes: Mapping[str, Tensor], r0: int, r1: int, c0: int, c1: int) -> dict[str, Tensor]:
        """Views of planes for rows r0..r1 and columns c0..c1, all on block boundaries."""
        raise NotImplementedError

    @staticmethod
    def _join(pieces: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Planes of pieces that follow one another along the rows."""
        raise NotImplementedError
