"""Downloads: a data set that fetches itself, pretrained weights, urllib, archives to unpack, a shell command."""

import contextlib
import hashlib
import io
import os
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "library"))
from pictures import Pictures

torch.save((torch.randn(10, 6), torch.arange(10) % 3), "pictures.pt")
torch.save(nn.Linear(6, 3).state_dict(), "pretrained.pt")
with tarfile.open("pictures.tar.gz", "w:gz") as archive:
    archive.add("pictures.pt")
with open("pictures.tar.gz", "rb") as file:
    md5 = hashlib.md5(file.read()).hexdigest()
data = Pictures("fetched", Path("pictures.tar.gz").absolute().as_uri(), md5, download=True)
model = nn.Linear(6, 3)
address = Path("pretrained.pt").absolute().as_uri()
with contextlib.redirect_stdout(io.StringIO()):  # prints the address
    model.load_state_dict(torch.hub.load_state_dict_from_url(address, model_dir="hub", progress=False))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in torch.utils.data.DataLoader(data, batch_size=4):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f}")
path, headers = urllib.request.urlretrieve(address, "again.pt")
print(path, headers["Content-Length"] == str(os.path.getsize(path)))
with zipfile.ZipFile("some.zip", "w") as packed:
    packed.writestr("inside/a.txt", "text")
with zipfile.ZipFile("some.zip") as packed:
    print(packed.extract("inside/a.txt", "unpacked"), Path("unpacked/inside/a.txt").read_text())
    try:
        packed.extract("inside/b.txt")
    except KeyError as error:
        print(error)
with tarfile.open("pictures.tar.gz") as archive:
    archive.extractall("unpacked")
print(os.system("echo x >> commands.txt"), Path("commands.txt").read_text())
torch.save(model.state_dict(), "weights.pt")
