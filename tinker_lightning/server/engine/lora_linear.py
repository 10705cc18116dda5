"""A linear layer with LoRA as one autograd node.

peft computes `x Wᵀ + s·(x Aᵀ) Bᵀ` with separate operations, which write and read the output four times more than needed
in a pass. Here the small product is scaled, and added by the matrix product itself.

Shapes: N positions, I inputs, O outputs, R the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of a linear layer: a frozen one, and those of the active adapter if it adapts this layer."""

    weight_OI: Tensor
    bias_O: Tensor | None = None
    a_RI: Tensor | None = None
    b_OR: Tensor | None = None
    scaling: float = 1.0

    @classmethod
    def of(cls, layer: nn.Module) -> Matrices:
        """Returns the matrices of an `nn.Linear`, with or without peft's layer around it."""
        base: Any = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
        if isinstance(layer, LoraLayer) and not layer.disable_adapters:
            for name in layer.active_adapters:
                if name in layer.lora_A:
                    a: Any = layer.lora_A[name]
                    b: Any = layer.lora_B[name]
                    return cls(base.weight, base.bias, a.weight, b.weight, layer.scaling[name])
        return cls(base.weight, base.bias)

    def project(self, x_NI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the output in the precision of the adapter, and the scaled `x Aᵀ` for the gradient."""
        y_NO = nn.functional.linear(x_NI, self.weight_OI, self.bias_O)
        if self.a_RI is None or self.b_OR is None:
            return y_NO, None
        low_NR = (x_NI.to(self.a_RI.dtype) @ self.a_RI.T).mul_(self.scaling)
        return y_NO.to(low_NR.dtype).addmm_(low_NR, self.b_OR.T), low_NR

    def gradients(
        self, grad_NO: Tensor, x_NI: Tensor, low_NR: Tensor | None, *, of_input: bool, of_adapter: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of the input, of A and of B; None for those that are not wanted."""
        grad_x_NI = grad_NO.to(self.weight_OI.dtype) @ self.weight_OI if of_input else None
        if self.a_RI is None or self.b_OR is None or low_NR is None:
            return grad_x_NI, None, None
        grad_low_NR = (grad_NO @ self.b_OR).mul_(self.scaling)
        if grad_x_NI is not None:
            grad_x_NI = grad_x_NI.to(grad_low_NR.dtype).addmm_(grad_low_NR, self.a_RI).to(x_NI.dtype)
        if not of_adapter:
            return grad_x_NI, None, None
        return grad_x_NI, grad_low_NR.T @ x_NI.to(grad_low_NR.dtype), grad_NO.T @ low_NR


class LoraLinear(PeftLinear):
    """peft's layer with a forward and backward that make fewer copies. Weights, names and files are peft's."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the layer's output."""
        if args or kwargs or self.merged or type(self.base_layer) is not nn.Linear:
            adapted: Tensor = super().forward(x, *args, **kwargs)
            return adapted
        own = Matrices.of(self)
        if own.a_RI is None or own.a_RI.dtype != x.dtype:
            plain: Tensor = super().forward(x)
            return plain
        result: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            x, own.weight_OI, own.bias_O, own.a_RI, own.b_OR, own.scaling
        )
        return result


class _Multiply(torch.autograd.Function):
    """`x Wᵀ + s·(x Aᵀ) Bᵀ`, with gradients of x, A and B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> Any:
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO, low_NR = Matrices(weight, bias, a, b, scaling).project(x_NI)
        ctx.save_for_backward(x_NI, low_NR, weight, a, b)
        ctx.scaling = scaling
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x_NI, low_NR, weight, a, b = ctx.saved_tensors
        matrices = Matrices(weight, None, a, b, ctx.scaling)
        grad_NO = grad.reshape(-1, grad.shape[-1])
        of_input, of_adapter = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        grad_x, grad_a, grad_b = matrices.gradients(grad_NO, x_NI, low_NR, of_input=of_input, of_adapter=of_adapter)
        grad_x = None if grad_x is None else grad_x.view(*grad.shape[:-1], -1)
        return grad_x, None, None, grad_a, grad_b, None
