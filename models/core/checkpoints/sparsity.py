"""Where zeroes may stand in a layer's weights: any share of them, or N kept of each M.

Letters: O outputs and I inputs of a layer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from models.types import Frozen

if TYPE_CHECKING:
    from torch import Tensor


class Pattern(Frozen):
    """Where zeroes may stand; a recipe may write `0.5` or `"2:4"` for it.

    Attributes:
        sparsity: share of zeroes where any weight may be one.
        kept: N, how many of each group are kept where the zeroes are regular.
        group: M, neighbours along a row.
    """

    sparsity: float | None = Field(None, gt=0, lt=1)
    kept: int | None = Field(None, ge=1)
    group: int | None = Field(None, ge=2)

    @model_validator(mode="before")
    @classmethod
    def _spelt(cls, value: Any) -> Any:
        if isinstance(value, float | int):
            return {"sparsity": value}
        if isinstance(value, str):
            kept, colon, group = value.partition(":")
            if not colon or not kept.isdecimal() or not group.isdecimal():
                raise ValueError(f'a pattern is a share such as 0.5, or N:M such as "2:4"; got {value!r}')
            return {"kept": int(kept), "group": int(group)}
        return value

    @model_validator(mode="after")
    def _is_one_of_two(self) -> "Pattern":
        if (self.sparsity is None) == (self.kept is None) or (self.kept is None) != (self.group is None):
            raise ValueError("a pattern has either sparsity, or both kept and group")
        if self.kept is not None and self.group is not None and self.kept >= self.group:
            raise ValueError(f"{self.kept}:{self.group} would keep all weights; N must be below M")
        return self

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}" if self.sparsity is None else f"{self.sparsity:g}"

    @property
    def zeroes(self) -> float:
        """The share of zeroes."""
        return self.sparsity if self.sparsity is not None else 1 - (self.kept or 0) / (self.group or 1)

    def holds(self, weight: "Tensor") -> bool:
        """Whether a layer [O, I] has zeroes as the pattern says, or more of them."""
        if self.group is not None:
            return bool(((weight.unflatten(1, (-1, self.group)) != 0).sum(-1) <= (self.kept or 0)).all())
        # Rows or layers have round(n · sparsity) zeroes.
        return float((weight == 0).float().mean()) >= self.zeroes - 0.5 / weight.shape[1] - 1e-6

    def keep(self, scores: "Tensor", over: Literal["row", "layer"]) -> "Tensor":
        """Choose the weights of [O, I] scores that stay, the highest first: [O, I] bool.

        Where any weight may be zero, `over` says who competes; groups are of one row in any case. Of a row or layer of
        n weights round(n · sparsity) are False, of a group of M all but N. ValueError if I is not divisible by M, or so
        few weights compete that none or all of them would be zero.
        """
        import torch  # recipes, which have patterns too, must be read without it

        if self.sparsity is None:
            require_groups(scores.shape, self)
            competing, kept = scores.unflatten(1, (-1, self.group)), self.kept
        else:
            competing = scores if over == "row" else scores.flatten()
            kept = competing.shape[-1] - round(self.sparsity * competing.shape[-1])
            if not 0 < kept < competing.shape[-1]:
                raise ValueError(
                    f"sparsity {self.sparsity:g} of {competing.shape[-1]} weights is not one weight zero and one kept"
                )
        best = competing.topk(kept, dim=-1, sorted=False).indices
        return torch.zeros_like(competing, dtype=torch.bool).scatter_(-1, best, True).view(scores.shape)


def require_groups(shape: Sequence[int], pattern: Pattern, name: str = "the layer") -> None:
    """Raise ValueError if a layer's rows don't divide into the pattern's groups."""
    if pattern.group is not None and shape[-1] % pattern.group:
        raise ValueError(f"{name} is {shape[-1]} wide, which {pattern.group} of pattern {pattern} does not divide")
