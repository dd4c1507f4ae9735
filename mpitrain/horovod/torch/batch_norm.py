"""SyncBatchNorm with Horovod's arguments."""

from __future__ import annotations

from mpitrain.comm import Communicator
from mpitrain.horovod.torch.session import global_process_set
from mpitrain.layers import sync_batchnorm


class HorovodBatchNorm(sync_batchnorm.SyncBatchNorm):
    """A BatchNorm over the batches of all ranks in training, on the CPU and on devices.

    Args:
        num_features: Size of the second dimension.
        eps, momentum, affine, track_running_stats: Options of torch's BatchNorm.

    Shape:
        Input and output [batch, features, ...]; ranks may have batches of different sizes.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        options = {"eps": eps, "momentum": momentum, "affine": affine, "track_running_stats": track_running_stats}
        super().__init__(num_features, global_process_set.require().comm, **options)

    @property
    def comm(self) -> Communicator:
        """Return the communicator of all ranks, which changes when ranks die."""
        return global_process_set.require().comm

    @comm.setter
    def comm(self, comm: Communicator) -> None:
        pass
