"""Train a small network with Lightning's Trainer on two ranks.

python lit.py FOLDER MAX_STEPS SAVE_STEPS [NODES]

It resumes from FOLDER/last.ckpt if there is one.
"""

import json
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

folder, max_steps, save_steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
nodes = int(sys.argv[4]) if len(sys.argv) > 4 else 1


class Sums(torch.utils.data.Dataset):
    """Vectors and their sums."""

    def __init__(self):
        self.x = torch.randn(640, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(0.003)  # a step takes some 30 ms
        return self.x[index], self.x[index].sum(0, keepdim=True)


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(3)
model = Network()
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=2 // nodes,
    num_nodes=nodes,
    max_steps=max_steps,
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=save_steps, save_top_k=1)],
)
last = folder / "last.ckpt"
trainer.fit(
    model,
    torch.utils.data.DataLoader(Sums(), batch_size=8, shuffle=True),
    ckpt_path=str(last) if last.exists() else None,
)
if trainer.is_global_zero:
    x = Sums().x
    loss = torch.nn.functional.mse_loss(model.layers(x), x.sum(1, keepdim=True)).item()
    (folder / "result.json").write_text(
        json.dumps({"step": trainer.global_step, "loss": loss, "world_size": trainer.world_size})
    )
