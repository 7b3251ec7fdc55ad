# SPDX-License-Identifier: MIT
"""Styles for plans of :func:`torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from fla.ops._common.checks import ArgumentError

__all__ = ["LinearLossParallel", "NormParallel", "PrepareModuleWeight", "SwiGLULinearParallel"]


class NormParallel(SequenceParallel):
    """Norm of a sequence that is sharded over ranks: torch's ``SequenceParallel`` under the reference's name.

    Parameters are replicated; the first positional input is expected, or brought, to be sharded along
    ``sequence_dim``; the output is a DTensor unless ``use_local_output``.

    Raises:
        ValueError: the input is not a tensor.
    """


class PrepareModuleWeight(ParallelStyle):
    """Wrap a module's own parameters (not its children's) as DTensors; each rank's tensor is its local part.

    Args:
        layouts: placement; ``Replicate()`` when None.
    """

    def __init__(self, *, layouts: Placement | None = None) -> None:
        super().__init__()
        self.layouts = layouts or Replicate()

    def _wrap(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.detach(), device_mesh, [self.layouts], run_check=False)
            module.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._wrap("", module, device_mesh)
        return module


class SwiGLULinearParallel(ParallelStyle):
    """:class:`fla.modules.mlp.SwiGLULinear` with the inner channels shared by the ranks.

    ``x``, ``y`` ``[..., D]`` and ``weight`` ``[O, D]`` are sharded along `D` and ``bias`` is replicated; local tensors
    are taken as this rank's part.

    Args:
        input_layouts: placement of local ``x`` and ``y``; ``Shard(-1)`` when None.
        output_layouts: placement that the output is brought to; ``Replicate()`` when None.
        use_local_output: return the local part of the output.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Shard(-1)
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _inputs(self, module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Any, ...]:
        x, y, weight, bias = inputs

        def place(tensor: Tensor, given: Placement, wanted: Placement) -> DTensor:
            if not isinstance(tensor, DTensor):
                tensor = DTensor.from_local(tensor, device_mesh, [given], run_check=False)
            return tensor.redistribute(device_mesh, [wanted])

        return (
            place(x, self.input_layouts, Shard(x.dim() - 1)),
            place(y, self.input_layouts, Shard(y.dim() - 1)),
            place(weight, Shard(1), Shard(1)),
            None if bias is None else place(bias, Replicate(), Replicate()),
        )

    def _outputs(self, module: nn.Module, outputs: Any, device_mesh: DeviceMesh) -> Any:
        outputs = outputs.redistribute(device_mesh, [self.output_layouts])
        return outputs.to_local() if self.use_local_output else outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # The stub says that input_fn returns nothing; its result replaces the inputs.
        return distribute_module(module, device_mesh, None, self._inputs, self._outputs)  # type: ignore[arg-type]


class LinearLossParallel(ParallelStyle):
    """:class:`fla.modules.FusedLinearCrossEntropyLoss` of a sequence that is sharded over ranks.

    ``x`` and ``target`` are expected, or brought, to be sharded along ``sequence_dim``, ``weight`` and ``bias`` are
    replicated; local tensors are taken as this rank's part. Every rank gets the loss of its own tokens, a local tensor.
    Gradients are those of the sum of the ranks' losses: with ``reduction="sum"`` that is the whole loss; with
    ``"mean"`` divide by the number of ranks.

    Args:
        sequence_dim: the axis that is sharded.
        use_local_output: accepted as in the reference package; the loss is local either way.

    Raises:
        ArgumentError: the module is not called with ``x, target, weight, bias`` by position.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__()
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _inputs(self, module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Any, ...]:
        if len(inputs) != 4:
            raise ArgumentError(
                f"LinearLossParallel takes `x, target, weight, bias` by position (bias may be None), got {len(inputs)}."
            )

        def local(tensor: Tensor | None, placement: Placement, grad: Placement) -> Tensor | None:
            if tensor is None:
                return None
            if not isinstance(tensor, DTensor):
                tensor = DTensor.from_local(tensor, device_mesh, [placement], run_check=False)
            return tensor.redistribute(device_mesh, [placement]).to_local(grad_placements=[grad])

        x, target, weight, bias = inputs
        shard = self.sequence_sharding[0]
        return (
            local(x, shard, shard),
            local(target, shard, shard),
            local(weight, Replicate(), Partial()),
            local(bias, Replicate(), Partial()),
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # The stub says that input_fn returns nothing; its result replaces the inputs.
        return distribute_module(module, device_mesh, None, self._inputs, None)  # type: ignore[arg-type]
