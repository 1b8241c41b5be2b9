"""Fully sharded training: of each weight, its gradient, its moments and the teacher's, a device holds its share."""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from cribo.models import Backbone
from cribo.pretraining.network import Network
from cribo.pretraining.parameters import block_names
from cribo.pretraining.shares import shared_like, whole

log = logging.getLogger("cribo")


class ShardedStrategy(ModelParallelStrategy):
    """PyTorch's FSDP2 over all devices, with the checkpoints of an unshared run.

    A block's weights are gathered when it computes, forward and backward, and given back right after it; gradients
    are added up over the devices into shares. Sums are taken in another order than under DDP, and that is all that
    differs. The module calls `share` when it is configured, before a checkpoint is loaded.

    Checkpoints are gathered tensor by tensor on the host of the first process, which writes them as any others; when
    they are loaded, each process reads its own shares from the file.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)
        self._hollow_teacher: Network | None = None

    # ------------------------------------------------------------------------------------------------- set-up

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Before, as under DDP: callbacks and module find what was loaded when training begins."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Yes: `load_optimizer_state_dict` does it."""
        return True

    def setup_environment(self) -> None:
        """Connect the processes; unlike in the class above, a module need not be there yet."""
        self._setup_distributed()
        self._device_mesh = init_device_mesh(self.root_device.type, (self.world_size,))

    def share(self, module: LightningModule, student: Network, teacher: Network) -> None:
        """Leave each process its share of both networks, which are parts of a module; to be called by all.

        Args:
            module: batch norms are synchronised in all of it, where they are to be.
            student: on the host, the same on all processes but for rounding: the first one's weights count.
            teacher: its copy.
        """
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        for network in (student, teacher):
            network.to(memory_format=torch.contiguous_format)  # FSDP takes no other
        self._send_weights(student)
        teacher.load_state_dict(student.state_dict())
        self._hollow_teacher = _hollow(teacher)
        for network in (student, teacher):
            self._share(network)

    def _send_weights(self, network: Network) -> None:
        """Give all processes the first one's weights: random numbers are rounded by one processor as not by another."""
        for tensor in network.state_dict().values():
            sent = tensor.to(self.root_device)
            dist.broadcast(sent, 0)
            tensor.copy_(sent)

    def _share(self, network: Network) -> None:
        for block in _blocks(network.backbone):
            fully_shard(block, mesh=self.device_mesh, reshard_after_forward=True)
        # What is used apart is a root of its own. By itself FSDP would keep a root whole between its passes.
        for part in (network.backbone, network.head, network.image_prototypes, network.object_prototypes):
            fully_shard(part, mesh=self.device_mesh, reshard_after_forward=True)
        for layer in (network.image_prototypes, network.object_prototypes):
            register_fsdp_forward_method(layer, "normalised")

    # --------------------------------------------------------------------------------------------- in training

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Block nothing: gradients are shared after each micro-batch, for until then a device holds them whole."""
        yield

    def whole_teacher(self, teacher: Network) -> Network:
        """A plain copy on this process's device; to be called by all, and not to be kept for long."""
        gathered = copy.deepcopy(self._hollow_teacher)
        assert gathered is not None
        gathered.load_state_dict({name: whole(value) for name, value in teacher.state_dict().items()}, assign=True)
        return gathered.to(self.root_device)  # buffers that no state holds

    # --------------------------------------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state on the first process, nothing on the others; to be called by all."""
        assert self.lightning_module is not None
        return self._gather(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The same of an optimiser, in its own form."""
        state = optimizer.state_dict()
        return state | {"state": {key: self._gather(moments) for key, moments in state["state"].items()}}

    def _gather(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """On the host, one after the other: elsewhere there is never more than one of them whole."""
        gathered = {}
        for name, tensor in tensors.items():
            copied = whole(tensor)
            if self.is_global_zero:
                gathered[name] = copied.cpu()
        return gathered

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Have the first process write it, as under DDP."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """What the file holds, whole; nothing is taken up yet."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take up this process's shares."""
        assert self.lightning_module is not None
        own, state = self.lightning_module.state_dict(), checkpoint["state_dict"]
        shares = {name: shared_like(value, own[name]) if name in own else value for name, value in state.items()}
        self.lightning_module.load_state_dict(shares, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take up this process's shares of the moments; steps are counted by all."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            shares = {
                key: {
                    name: shared_like(value, parameters[key]) if value.ndim else value.clone()
                    for name, value in moments.items()
                }
                for key, moments in state["state"].items()
            }
            optimizer.load_state_dict(state | {"state": shares})


def _blocks(backbone: Backbone) -> list[nn.Module]:
    """What is gathered at a time; a network without blocks that are known is gathered as one."""
    modules: dict[str, nn.Module] = dict(backbone.named_modules())
    found = [modules[name] for name in block_names(name for name, _ in backbone.named_parameters()) if name in modules]
    if not found:
        log.warning(
            "%s has no blocks that are known here: runtime.strategy fsdp gathers all of it whenever it computes, and "
            "saves the memory of gradients and moments alone",
            backbone.name,
        )
    return found


def _hollow(network: Network) -> Network:
    """A copy without memory for weights, to be filled."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in network.parameters()
    }
    return copy.deepcopy(network, memo)
