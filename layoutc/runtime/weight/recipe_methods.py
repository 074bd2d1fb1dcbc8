"""The methods that every generated tensor class has: one recipe's arithmetic and cuts, on plain planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


class Generated:
    """Methods that the compiler generates for each recipe. x: (m, k), fp32, bf16 or fp16. planes: by name."""

    @staticmethod
    def _matrix_values(planes: Mapping[str, Tensor], m: int, k: int, orientation: str, dtype: torch.dtype) -> Tensor:
        """The (m, k) values of an orientation, computed in fp32 and rounded once to `dtype`."""
        raise NotImplementedError

    @staticmethod
    def _lay_out(
        planes: Mapping[str, Tensor], m: int, k: int, orientations: tuple[str, ...], swizzled: bool = False
    ) -> dict[str, Tensor]:
        """The buffers of orientations. A buffer that equals a plane is that plane."""
        raise NotImplementedError

    @classmethod
    def _quantize_buffers(cls, x: Tensor, amax: Any, orientations: tuple[str, ...], swizzled: bool) -> Any:
        """Quantizes an (m, k) matrix to buffers in one launch; None, with nothing done, if there is no such kernel."""
        return None

    @classmethod
    def _quantize_matrix(
        cls, x: Tensor, amax: Tensor | None, orientations: Sequence[str], out: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Quantizes (m, k) values to planes: those of `out` if a kernel can write into them, else new ones."""
        raise NotImplementedError

    @classmethod
    def _quantize_group(
        cls, xs: Tensors, amaxes: Tensors | None, orientations: Sequence[str], outs: Sequence[Mapping[str, Tensor]]
    ) -> bool:
        """_quantize_matrix for each of xs, in few launches; False, with nothing done, if there are no such kernels."""
        return False

    @classmethod
    def _shared_amax(cls, x: Tensor) -> Tensor:
        """The amax that shards must agree on before they quantize, in recipes that share one."""
        raise NotImplementedError

    @staticmethod
    def _cut(planes: Mapping[str, Tensor], r0: int, r1: int, c0: int, c1: int) -> dict[str, Tensor]:
        """Views of planes: rows r0..r1 and columns c0..c1 of the matrix, all on block boundaries."""
        raise NotImplementedError

    @staticmethod
    def _join(pieces: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The planes of pieces joined along the rows."""
        raise NotImplementedError
