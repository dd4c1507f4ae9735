"""Files: logs, CSV, JSON, NumPy, pathlib, folders that must not exist, errors, a clock, a temporary folder."""

import csv
import glob
import json
import logging
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

out = Path("written")
if not out.exists():
    out.mkdir()
try:
    os.mkdir("written")
except FileExistsError as error:
    print(type(error).__name__, error.filename)
logging.basicConfig(filename="written/log.txt", level=logging.INFO, force=True)
model, start = nn.Linear(3, 1), time.time()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    loss = model(torch.randn(8, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with open("written/losses.csv", "a") as file:
        csv.writer(file).writerow([epoch, f"{loss:.10f}"])
        file.flush()
        os.fsync(file.fileno())
    logging.info("epoch %d", epoch)
    (out / f"epoch-{epoch}.json").write_text(json.dumps({"epoch": epoch}))
    np.save(out / "weights.npy", model.weight.detach().numpy())
with open("written/losses.csv") as file:
    print(len(file.readlines()), len((out / "log.txt").read_text().splitlines()))
print(sorted(os.listdir("written")), sorted(glob.glob("written/*.json")), np.load("written/weights.npy").shape)
os.rename("written/epoch-0.json", "written/first.json")
print(
    json.loads(Path("written/first.json").read_text()),
    os.path.getsize("written/first.json"),
    os.path.isfile("written/epoch-0.json"),
)
with open("written/first.json", "r+") as file:
    content = file.read()
    file.seek(0)
    file.write(content.upper())
print(Path("written/first.json").read_text(), [len(files) for _, _, files in os.walk("written")])


def append(number):
    """Write a line, as a thread of a logger does."""
    with open("written/thread.txt", "a") as file:
        file.write(f"{number}\n")


with ThreadPoolExecutor(1) as pool:
    list(pool.map(append, range(3)))
with open("written/thread.txt") as file:
    print(file.read().split())
model.last = model(torch.randn(8, 3)).detach()
torch.save(model, "written/model.pt")  # with a batch as attribute
print(torch.load("written/model.pt", weights_only=False).last.sum().item())
with tempfile.TemporaryDirectory() as folder:
    torch.save(model.state_dict(), f"{folder}/x.pt")
    print(sorted(torch.load(f"{folder}/x.pt")), os.listdir(folder))
shutil.copy("written/first.json", "copied.json")
shutil.rmtree("written")
try:
    os.remove("absent")
except OSError as error:
    print(error)
steps = 0
while time.time() - start < 0.05 + 0.0 * steps:  # a clock in a condition
    model(torch.randn(8, 3)).sum().backward()
    steps += 1
print(os.path.exists("written"), os.path.exists("copied.json"))
