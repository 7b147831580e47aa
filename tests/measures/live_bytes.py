"""Count the bytes of all tensors that are alive: what a computation needs, whatever the allocator keeps."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the block, ``peak`` is the most that tensors made there took together at any time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sum = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self._sum += storage.nbytes()
        if self._sum > self.peak:  # perhaps: those that are gone have to be taken off first
            self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
            self._sum = sum(size for _, size in self._made.values())
            self.peak = max(self.peak, self._sum)
        return results


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
