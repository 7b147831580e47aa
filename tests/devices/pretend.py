"""Accelerators that are not there: tensors with CPU data that say they are on "cuda:0", "cuda:1" or "mps".

Inside ``with Machine() as machine:`` tensors made with such a device, or moved to it, behave as there in what can be
seen without one:

- operations refuse tensors of different devices, but for the exceptions torch makes (numbers in 0-D tensors of the CPU,
  indices of the CPU, copies);
- "mps" has no float64, and no decompositions;
- numpy and the CPU's fused kernels are out of reach;
- every operation is a launch, with the line of kronscope it came from, and every one that the host has to wait for a
  synchronisation. ``_foreach`` operations are one launch for 64 tensors of one kind;
- bytes of the tensors that are alive are counted, with their peak.

Not seen are times, what the kernels of a vendor's library do inside, and rounding of their own: results are the CPU's.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.devices.facts import (
    FOREACH_CHUNK,
    INDEXING,
    NO_LAUNCH,
    NOT_ON_MPS,
    STRICT,
    WAITING,
    calling_line,
    is_diagonal,
    read_off,
)

CPU = torch.device("cpu")

_MOVES = frozenset((Tensor.to, Tensor.cpu, Tensor.cuda))
_PRODUCTS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__))
_MAKING = frozenset((torch.tensor, torch.as_tensor))
_OF_THE_DATA = frozenset((Tensor.untyped_storage, Tensor.data_ptr))
_SPECIAL = _MOVES | _PRODUCTS | _MAKING


class DeviceError(RuntimeError):
    """An operation was given tensors of different devices."""


class PretendTensor(Tensor):
    """A tensor with CPU data that says it is elsewhere; made by :class:`Machine` only."""

    data_here: Tensor
    said: torch.device
    _held: _Held

    @staticmethod
    def __new__(cls, data: Tensor, device: torch.device) -> PretendTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=CPU,
        )
        made.data_here, made.said = data, device
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PretendTensor({self.data_here}, device='{self.said}')"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.said

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.said.type == "cuda"

    @property
    def is_mps(self) -> bool:  # type: ignore[override]
        return self.said.type == "mps"

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.said} device type tensor to numpy. Use Tensor.cpu() first.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = Machine.running().place(self.data_here.detach().clone(), self.said)
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_THE_DATA:
            return func(args[0].data_here)
        if func is Tensor.tolist:
            machine = Machine.running()
            machine.wait("tolist")
            return args[0].data_here.tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return Machine.running().run(func, args, kwargs or {})


class _Held:
    """Counts the bytes of a pretended tensor for as long as the tensor has it. (``weakref.finalize`` takes longer.)"""

    __slots__ = ("_key", "_machine", "_storage")

    def __init__(self, machine: Machine, storage: torch.UntypedStorage) -> None:
        self._machine, self._storage, self._key = machine, storage, storage._cdata
        machine._hold(self._key, storage)

    def __del__(self) -> None:
        self._machine._release(self._key, self._storage)


class Machine(TorchDispatchMode):
    """A computer with accelerators.

    Args:
        float64_on_mps: Let "mps" have float64, which no such device does: for negative controls.

    Attributes:
        launches: Number of launches by operation and line.
        waits: Number of synchronisations by what was waited for and line.
        live: Bytes of tensors on accelerators that are alive.
        peak: The most there were since :meth:`reset`.
    """

    # torch makes a device ready before an operation gets here, unless this key says that tensors are not real
    _mode_key = torch._C._TorchDispatchModeKey.FAKE
    _running: ClassVar[list[Machine]] = []

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._holders: Counter[int] = Counter()
        self.reset()

    @classmethod
    def running(cls) -> Machine:
        assert cls._running, "pretended tensors live inside `with Machine():` only"
        return cls._running[-1]

    def reset(self) -> None:
        """Begin to count."""
        self.launches: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.slow_foreach: Counter[str] = Counter()
        self.peak = self.live

    @property
    def counts(self) -> tuple[int, int]:
        """Launches and synchronisations."""
        return sum(self.launches.values()), sum(self.waits.values())

    def report(self, lines: int = 15) -> str:
        """Return where most launches and synchronisations came from, for the message of a test."""
        rows = [f"{count:6} launches  {name}  {line}" for (name, line), count in self.launches.most_common(lines)]
        rows += [f"{count:6} waits  {name}  {line}" for (name, line), count in self.waits.most_common(lines)]
        return "\n" + "\n".join(rows)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled here, and keeping the compiler out takes a tenth of an operation's time
        return False

    # --- making and moving ----------------------------------------------------------------------------------------

    def __enter__(self) -> Machine:
        self._running.append(self)
        self._overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        # otherwise Module.to would put a pretended tensor into the place of a real one
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._calls = _Calls(self)
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*error)  # type: ignore[no-untyped-call]
        torch.__future__.set_overwrite_module_params_on_conversion(self._overwrites)
        self._running.pop()

    def place(self, data: Tensor, device: torch.device | str) -> Tensor:
        """Return data of the CPU as if it were on a device; not counted."""
        device = _indexed(torch.device(device))
        if device.type == "cpu":
            return data
        if device.type == "mps" and data.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        made = PretendTensor(data, device)
        made._held = _Held(self, data.untyped_storage())
        return made

    def _hold(self, key: int, storage: torch.UntypedStorage) -> None:
        if not self._holders[key]:
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
        self._holders[key] += 1

    def _release(self, key: int, storage: torch.UntypedStorage) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            self.live -= storage.nbytes()

    def moved(self, name: str, source: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        """Do what ``Tensor.to``, ``cpu`` and ``cuda`` do."""
        device, dtype = source.device, source.dtype
        if name in ("cpu", "cuda"):
            device = torch.device(name)
        else:
            for given in (*rest, kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")):
                if isinstance(given, Tensor):
                    device, dtype = given.device, given.dtype
                elif isinstance(given, torch.dtype):
                    dtype = given
                elif isinstance(given, torch.device | str):
                    device = torch.device(given)
        device = _indexed(device)
        if device == source.device and dtype == source.dtype and not kwargs.get("copy", False):
            return source
        if device == source.device:
            return cast(Tensor, torch.ops.aten._to_copy.default(source, dtype=dtype))
        return cast(Tensor, _Moved.apply(source, device, dtype))  # type: ignore[no-untyped-call]

    # --- what happens ---------------------------------------------------------------------------------------------

    def wait(self, what: str) -> None:
        """Note that the host waits."""
        self.waits[what, calling_line()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation on CPU data, if the devices allow it, and note it."""
        if func is torch.ops.prim.device.default:
            return args[0].device
        there: list[PretendTensor] = []
        here: list[Tensor] = []
        for one in _flat(args, kwargs):
            if isinstance(one, PretendTensor):
                there.append(one)
            elif isinstance(one, Tensor):
                here.append(one)
        wanted = kwargs.get("device")
        target = _indexed(torch.device(wanted)) if wanted is not None else None
        if not there and (target is None or target.type in ("cpu", "meta")):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_to_copy":
            return self._copied(args[0], target, kwargs)
        if name == "copy_":
            return self._copied_into(args[0], args[1])
        device = self._device_of(func, name, args, here, there, target)
        if device.type == "mps" and name in NOT_ON_MPS:
            raise NotImplementedError(f"The operator 'aten::{name}' is not currently implemented for the MPS device.")
        is_foreach = name.startswith("_foreach")
        if device.type != "cpu" and name.startswith("_fused"):
            raise RuntimeError(f"{name} of the CPU was given tensors on {device} ({calling_line()}).")
        self._note(func, name, args, there)
        args = tuple(map(_on_the_cpu, args))
        if kwargs:
            kwargs = {key: _on_the_cpu(value) for key, value in kwargs.items() if key != "pin_memory"}
            if "device" in kwargs:
                kwargs["device"] = CPU
        out = read_off(args[0]) if name == "_linalg_eigh" and is_diagonal(args[0]) else func(*args, **kwargs)
        if isinstance(out, Tensor):
            return self._wrapped(out, there, device)
        if isinstance(out, (list, tuple)):
            devices = iter([one.said for one in there]) if is_foreach else iter(())
            return type(out)(
                self._wrapped(one, there, next(devices, device)) if isinstance(one, Tensor) else one for one in out
            )
        return out

    def _wrapped(self, data: Tensor, there: list[PretendTensor], device: torch.device) -> Tensor:
        for same in there:
            # operations in place return what they were given, unless they change its shape
            if same.data_here is data and same.shape == data.shape and same.stride() == data.stride():
                return same
        return self.place(data, device)

    def _copied(self, source: Tensor, target: torch.device | None, kwargs: Any) -> Tensor:
        here = source.device
        target = here if target is None else target
        plain = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
        if target.type == "mps" and plain.get("dtype", source.dtype) == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        if "cpu" in (here.type, target.type) and here != target:
            self.wait("copy to the host" if target.type == "cpu" else "copy from the host")
        self.launches["_to_copy", calling_line()] += 1
        data = source.data_here if isinstance(source, PretendTensor) else source
        return self.place(torch.ops.aten._to_copy.default(data, **plain), target)

    def _copied_into(self, target: Tensor, source: Tensor) -> Tensor:
        if target.device != source.device and CPU in (target.device, source.device):
            self.wait("copy to the host" if target.device == CPU else "copy from the host")
        self.launches["copy_", calling_line()] += 1
        data = source.data_here if isinstance(source, PretendTensor) else source
        (target.data_here if isinstance(target, PretendTensor) else target).copy_(data)
        return target

    def _device_of(
        self,
        func: Any,
        name: str,
        args: Any,
        here: list[Tensor],
        there: list[PretendTensor],
        target: torch.device | None,
    ) -> torch.device:
        """Return where an operation is done; refuse tensors of different devices."""
        places = {one.said for one in there}
        if name.startswith("_foreach"):
            # tensor by tensor where they are not all alike; then each set must be in one place
            if len(places) > 1 or here:
                self.slow_foreach[calling_line()] += 1
                lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor)]
                others = [one for one in args if isinstance(one, Tensor) and one.ndim]
                for alike in zip(*lists, strict=True):
                    if len({one.device for one in alike if one.ndim} | {one.device for one in others}) > 1:
                        raise DeviceError(f"{func}: {[one.device for one in alike]} ({calling_line()})")
                if len(places) > 1 and any(isinstance(one, PretendTensor) for one in args):
                    raise DeviceError(
                        f"{func}: a 0-D tensor of an accelerator for tensors of {places} ({calling_line()})"
                    )
            return next(iter(places))
        if len(places) > 1:
            raise DeviceError(f"{func}: tensors on {places} ({calling_line()})")
        if name in INDEXING:
            if not isinstance(args[0], PretendTensor):
                raise DeviceError(f"{func}: indices on {places} of a tensor on the CPU ({calling_line()})")
            if any(isinstance(one, Tensor) and not isinstance(one, PretendTensor) for one in args[1]):
                self.wait("indices from the host")
            if len(args) > 2 and not isinstance(args[2], PretendTensor) and args[2].ndim:
                raise DeviceError(f"{func}: values on the CPU ({calling_line()})")
        elif here and (any(one.ndim for one in here) or name in STRICT):
            shapes = [tuple(one.shape) for one in here]
            raise DeviceError(f"{func}: tensors {shapes} on the CPU, others on {places or target} ({calling_line()})")
        return next(iter(places)) if places else cast(torch.device, target)

    def _note(self, func: Any, name: str, args: Any, there: list[PretendTensor]) -> None:
        if name in WAITING:
            self.wait(name)
        if name in INDEXING and any(
            isinstance(one, PretendTensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        ):
            self.wait("a mask as index")
        is_view, lists = _schema_of(func)
        if is_view or name in NO_LAUNCH:
            return
        number = 1
        if name.startswith("_foreach"):
            sets = -(-len(there) // lists)
            alike = len({(one.said, one.dtype) for one in there}) == 1
            number = -(-sets // FOREACH_CHUNK) if alike else sets
        self.launches[name, calling_line()] += number


def _flat(args: Any, kwargs: Any) -> list[Any]:
    """Return what an operation was given, with the tensors of its lists. (torch's own function is far slower.)"""
    flat: list[Any] = []
    for one in (*args, *kwargs.values()) if kwargs else args:
        # (a union of types takes ten times as long)
        if isinstance(one, (list, tuple)):
            flat.extend(one)
        else:
            flat.append(one)
    return flat


def _on_the_cpu(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.data_here
    if isinstance(value, (list, tuple)):
        return type(value)(_on_the_cpu(one) for one in value)
    return value


@functools.cache
def _schema_of(func: Any) -> tuple[bool, int]:
    """Return whether an operation makes a view, and how many lists of tensors it takes (at least one)."""
    schema = func._schema
    writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments)
    is_view = not writes and any(one.alias_info is not None for one in schema.returns)
    return is_view, max(1, sum("Tensor[]" in str(arg.type) for arg in schema.arguments))


def _indexed(device: torch.device) -> torch.device:
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.device(device.type, 0)


class _Moved(torch.autograd.Function):
    """A copy to another device, whose gradient goes back: torch itself would ask the tensor's true device."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        ctx.origin = source.device, source.dtype
        return cast(Tensor, torch.ops.aten._to_copy.default(source, dtype=dtype, device=device))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        device, dtype = ctx.origin
        return torch.ops.aten._to_copy.default(grads[0], dtype=dtype, device=device), None, None


class _Calls(TorchFunctionMode):
    """Catches the calls that would look for the device itself before an operation gets to :class:`Machine`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SPECIAL:
            if func in _OF_THE_DATA or func is Tensor.tolist:
                return func(*args, **kwargs)
            # as the tensors would do when asked in their turn
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _MOVES:
            return self._machine.moved(func.__name__, *args, **kwargs)
        if func in _PRODUCTS and isinstance(args[0], PretendTensor) and args[0].ndim == 1 < args[1].ndim:
            # torch removes a dimension in place, which a pretended tensor does not notice
            return (args[0].unsqueeze(0) @ args[1]).squeeze(-2)
        if func in _MAKING:
            device = kwargs.pop("device", None)
            if func is torch.as_tensor and isinstance(args[0], Tensor):
                wanted = (kwargs.get("dtype"), *args[1:], device)
                return self._machine.moved("to", args[0], *(one for one in wanted if one is not None))
            made = func(*args, **kwargs)
            return made if device is None else self._machine.moved("to", made, device)
        return func(*args, **kwargs)
