"""Training with lightning's DDP strategy over this backend."""

import sys

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import mpitrain.backend  # noqa: F401


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
strategy = DDPStrategy(process_group_backend="mpitrain", cluster_environment=TorchElasticEnvironment())
trainer = Trainer(
    accelerator="cpu",
    devices=int(sys.argv[1]),
    strategy=strategy,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, data)
group = type(torch.distributed.group.WORLD).__name__
print(f"{trainer.world_size} ranks, {trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.6f} {group}")
