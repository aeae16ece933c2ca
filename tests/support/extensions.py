"""Tensor subclasses that take part in FSDP2's all-gather, as quantization libraries write them.

FSDP2 asks a sharded parameter's local tensor for ``fsdp_pre_all_gather`` (what to gather) and
``fsdp_post_all_gather`` (how to make the unsharded parameter of what came back). Each class here
has one way of asking for trouble: several tensors, several dtypes, buffers that must persist.
"""

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
# After these the result is still a weight of the same kind.
_KEEPS_CLASS = {
    aten.detach.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.alias.default,
}


class Weight(torch.Tensor):
    """A dense tensor in a coat; subclasses say what is gathered."""

    @staticmethod
    def __new__(cls, data: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=data.device,
            requires_grad=data.requires_grad,
        )

    def __init__(self, data: torch.Tensor):
        self._data = data

    def __repr__(self):
        return f"{type(self).__name__}({self._data})"

    def dense(self) -> torch.Tensor:
        return self._data

    def __tensor_flatten__(self):
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, outer_size, outer_stride):
        return cls(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map_only(Weight, Weight.dense, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if func is aten.copy_.default or func._schema.name.endswith("_"):
            return args[0]  # in place
        if func in _KEEPS_CLASS:
            return tree_map_only(torch.Tensor, cls, result)
        return result


class OneTensorOld(Weight):
    """Gathers its data as they are; the old hook signature, which takes the mesh alone."""

    def fsdp_pre_all_gather(self, mesh):
        return (self._data,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (data,) = outputs
        if out is not None:
            # Built once, from buffers that FSDP2 promises to keep.
            assert same_storage(out, data), "the gather buffer was replaced"
            return None
        return data, ()


class OneTensorNew(Weight):
    """The same through the new hook signature, which says what the whole parameter looks like."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.size() == 1
        assert outer_size == self.size()
        assert outer_stride == self.stride()
        assert isinstance(module, nn.Module)
        return (self._data,), {"dtype": self.dtype}

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (data,) = outputs
        assert metadata == {"dtype": data.dtype}
        if out is not None:
            assert same_storage(out, data), "the gather buffer was replaced"
            return None
        return data, ()


class HalfGathered(Weight):
    """Gathers in bf16 and computes in the parameter's own dtype."""

    def fsdp_pre_all_gather(self, mesh):
        return (self._data.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (half,) = outputs
        assert half.dtype == torch.bfloat16
        return _fill(half.to(param_dtype), out)

    @staticmethod
    def as_seen(weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch.bfloat16).to(weight.dtype)


class HighAndLow(Weight):
    """Two tensors of two dtypes that add up to the data, to the bit."""

    def fsdp_pre_all_gather(self, mesh):
        high = self._data.to(torch.bfloat16)
        return (high, self._data - high.to(self._data.dtype)), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        high, low = outputs
        assert high.dtype == torch.bfloat16
        assert low.dtype == torch.float32
        return _fill(high.to(low.dtype) + low, out)

    @staticmethod
    def as_seen(weight: torch.Tensor) -> torch.Tensor:
        return weight


class Quantized(Weight):
    """Eight-bit rows and a scale for each: two tensors that differ in dtype and in size."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return quantize(self._data), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        rows, scale = outputs
        assert rows.dtype == torch.int8
        assert scale.shape == (rows.shape[0], 1)
        return _fill(rows.to(scale.dtype) * scale, out)

    @staticmethod
    def as_seen(weight: torch.Tensor) -> torch.Tensor:
        rows, scale = quantize(weight)
        return rows.to(scale.dtype) * scale


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
    return (weight / scale).round().to(torch.int8), scale


def _fill(value: torch.Tensor, out: torch.Tensor | None):
    """The unsharded parameter lives in memory of its own, which FSDP2 frees and brings back."""
    if out is None:
        return value, (value,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(value)
    return None


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class SeenAs(torch.autograd.Function):
    """A weight as the extension shows it to the forward; its gradient goes to the weight."""

    @staticmethod
    def forward(ctx, weight, show):
        return show(weight)

    @staticmethod
    def backward(ctx, grad):
        return grad, None
