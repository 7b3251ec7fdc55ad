# SPDX-License-Identifier: MIT
"""Styles for plans of :func:`torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

__all__ = ["NormParallel", "PrepareModuleWeight", "SwiGLULinearParallel"]


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
