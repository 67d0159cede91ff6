"""A pretend accelerator: tensors of the device "pretend" hold CPU tensors, and an operation that
mixes them with CPU tensors raises, as it does on CUDA. So a CPU finds the `.to(device)` that a GPU
would miss.

As on CUDA, tensors without dimensions may be on the CPU, indices into a pretend tensor, too, and
copies cross devices. `WAITS` counts what makes a CPU wait for a GPU: reading a value, copying to
the CPU, indexing by a boolean mask, whose result has as many entries as are set.
"""

import collections
import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")  # without casts
AUTOCAST.fallback(torch.library.fallthrough_kernel)
# so that tied weights stay tied in module.to(DEVICE)
torch.__future__.set_swap_module_params_on_conversion(True)

DEVICE = torch.device("pretend", 0)
WAITS = collections.Counter()
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
# of which indices may be on the CPU, but not values
INDEXING = {aten.index.Tensor: (), aten.index_put_.default: (2,)}


class Pretend(torch.Tensor):
    @staticmethod
    def __new__(cls, raw, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )

    def __init__(self, raw, requires_grad=False):
        self.raw = raw

    def tolist(self):
        WAITS["tolist"] += 1
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def is_pretend(x) -> bool:
    return isinstance(x, Pretend)


def map_tensors(function, x):
    """Call a function with each tensor of nested lists and tuples; return them with its results."""
    if isinstance(x, torch.Tensor):
        return function(x)
    if isinstance(x, (list, tuple)):
        return type(x)([map_tensors(function, item) for item in x])
    return x


def compute(operation, args: tuple, kwargs: dict):
    """Compute an operation on the CPU tensors that pretend ones hold; raise if it mixes devices."""
    if operation.overloadpacket is aten.to:  # inference mode leaves it whole
        given = {type(x): x for x in (*args[1:], *kwargs.values())}
        operation = aten._to_copy.default
        args = args[:1]
        kwargs = {
            "dtype": given.get(torch.dtype, args[0].dtype),
            "device": given.get(torch.device, args[0].device),
        }
    tensors = []
    map_tensors(tensors.append, [args, *kwargs.values()])
    pretend = [x for x in tensors if is_pretend(x)]
    plain = [x for x in tensors if not is_pretend(x) and x.dim() > 0]
    if pretend and plain and operation not in COPIES:
        values = [args[i] for i in INDEXING.get(operation, ()) if i < len(args)]
        if (
            operation not in INDEXING
            or not is_pretend(args[0])
            or any(x is y for x in values for y in plain)
        ):
            raise RuntimeError(
                f"{operation}: expected all tensors to be on the same device, but found pretend and cpu"
            )
    target = kwargs.get("device")
    to_pretend = target is not None and torch.device(target).type == "pretend"
    if pretend and (
        operation is aten._local_scalar_dense.default or target is not None and not to_pretend
    ):
        WAITS["item" if target is None else "cpu"] += 1
    masks = [x for x in pretend if x.dtype == torch.bool and x is not args[0]]
    if (
        operation in INDEXING
        and masks
        or operation in (aten.nonzero.default, aten.masked_select.default)
    ):
        WAITS["mask"] += 1
    if target is not None:
        kwargs = (
            {**kwargs, "device": torch.device("cpu"), "pin_memory": False} if to_pretend else kwargs
        )
    raw = lambda x: x.raw if is_pretend(x) else x
    raw_kwargs = {name: map_tensors(raw, x) for name, x in kwargs.items()}
    result = operation(*map_tensors(raw, args), **raw_kwargs)
    if operation is aten.copy_.default:
        return args[0]
    if not (to_pretend or pretend and target is None):
        return result
    # of operations in place
    same = {id(x.raw): x for x in pretend if operation is not aten.detach.default}
    wrap = lambda x: x if is_pretend(x) else same[id(x)] if id(x) in same else Pretend(x)
    return map_tensors(wrap, result)


class Operations(TorchDispatchMode):
    """Sees what makes tensors, which has no tensor to dispatch on."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Makes tensors of numbers on the CPU first: torch reads the numbers in C++."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if (
            function in (torch.tensor, torch.as_tensor)
            and torch.device(kwargs.get("device") or "cpu") == DEVICE
        ):
            del kwargs["device"]
            requires_grad = kwargs.pop("requires_grad", False)
            return function(*args, **kwargs).to(DEVICE).requires_grad_(requires_grad)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and is_pretend(args[0]):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(x) if isinstance(x, list) else x for x in index)
            args = (args[0], index if isinstance(args[1], tuple) else index[0], *args[2:])
        return function(*args, **kwargs)


class Stream:
    """Of a device that computes at once."""

    __init__ = synchronize = wait_stream = lambda self, *_, **__: None


class Backend(type(torch.pretend)):
    """What torch asks a device's module for."""

    Stream = Event = Stream
    current_stream = lambda self, device=None: Stream()
    stream = lambda self, stream=None: contextlib.nullcontext()
    synchronize = set_device = lambda self, device=None: None
    get_amp_supported_dtype = lambda self: [torch.bfloat16, torch.float16, torch.float32]


torch.pretend.__class__ = Backend
