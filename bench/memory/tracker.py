"""Bytes of live tensors, watched from outside: every storage from its creation over its resizes to its release."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTracker(TorchDispatchMode):
    """Sums the sizes of all storages that operations return while it is active, and keeps the largest sum.

    A storage counts from the operation that returns a tensor on it until it is released, at its size of the moment:
    `UntypedStorage.resize_`, with which full parameters are emptied and refilled, is watched too. It counts once
    however many tensors view it. Not seen: what an operation allocates and frees within itself, and what a
    communication library allocates for itself; that holds for whatever is measured.

    It is active on the thread that enters it, and on others that enter it meanwhile (as the engine's lanes do with the
    modes of whoever submits a job). It replaces `UntypedStorage.resize_` for the process while it is active.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._sizes: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._entered = 0
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        self.current = 0
        """Bytes alive."""
        self.peak = 0
        """The most bytes that were alive at one moment since `reset_peak`."""

    # ---- what others read -------------------------------------------------------------------------------------------

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that exist already."""
        for tensor in tensors:
            self._see(tensor)

    def reset_peak(self) -> None:
        """Starts a new measurement of the peak at what is alive now."""
        with self._lock:
            self.peak = self.current

    # ---- the mode ---------------------------------------------------------------------------------------------------

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Nothing is compiled here."""
        return True

    def __enter__(self) -> StorageTracker:
        with self._lock:
            if self._entered == 0:
                self._resize = torch.UntypedStorage.resize_
                torch.UntypedStorage.resize_ = self._watched_resize()  # type: ignore[method-assign, assignment]
            self._entered += 1
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        with self._lock:
            key = id(storage)  # torch keeps one Python object per storage for as long as the storage lives
            if key not in self._watchers:
                self._watchers[key] = weakref.ref(storage, lambda _: self._released(key))
            self._set(key, storage.nbytes())

    def _watched_resize(self) -> Callable[[torch.UntypedStorage, int], Any]:
        original = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            with self._lock:
                if id(storage) in self._watchers:
                    self._set(id(storage), storage.nbytes())
            return result

        return resize_

    def _released(self, key: int) -> None:
        with self._lock:
            self._watchers.pop(key, None)
            self.current -= self._sizes.pop(key, 0)

    def _set(self, key: int, size: int) -> None:
        self.current += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.current)
