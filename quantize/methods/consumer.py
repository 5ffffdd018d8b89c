"""A linear that reads a tensor which is about to be scaled, as the searches for that scale see it."""

from dataclasses import dataclass

import torch

from quantize.scheme import Scheme


@dataclass(frozen=True)
class Consumer:
    """`weight` float32 [N, K]."""

    weight: torch.Tensor
    scheme: Scheme
