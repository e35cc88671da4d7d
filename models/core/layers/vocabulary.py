"""Which tokens a smaller vocabulary keeps."""

import numpy as np
import torch
from torch import Tensor


def choose_vocabulary(token_counts: np.ndarray, size: int) -> Tensor:
    """Return the `size` most frequent target ids, ascending; ties go to the smaller id, the more common token."""
    return torch.from_numpy(np.sort(np.argsort(-np.asarray(token_counts), kind="stable")[:size]).astype(np.int64))
