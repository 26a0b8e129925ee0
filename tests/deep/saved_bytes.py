"""What a forward pass keeps for its backward pass, counted by hooks."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(model: torch.nn.Module, run: Callable[[], object]) -> int:
    """Bytes that `run()` keeps for its backward pass, parameters left out, each storage once."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, object] = {}  # the tensors too, or a freed storage's address would come again

    def keep(tensor: Any) -> Any:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in own)
