"""What a forward pass keeps until the backward pass: the part of training's memory that grows with the text."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def held_for_backward(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Return the bytes that `forward` keeps for the backward pass besides the model itself.

    All of it is held when the forward pass ends, which is its peak. Tensors that share memory count once; what autograd
    keeps of parameters and buffers is the model's own and not counted.

    Args:
        model: whose memory is left out.
        forward: runs it and returns the loss.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a tensor that is a node's own output would keep the node alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        # Kept until all is counted, or memory that is freed would be counted under the address of something else.
        loss = forward()
    total = sum(held.values())
    del loss
    return total
