"""A library with a data set that fetches its archive if it is missing, checks it and unpacks it, as in torchvision."""

import hashlib
import os
import tarfile
import time
from urllib.request import urlopen

import torch
from torch.utils.data import TensorDataset


class Pictures(TensorDataset):
    """Pictures and their labels.

    Args:
        root: Folder of the data set.
        url: Address of the archive.
        md5: Checksum of the archive.
        download: True to fetch the archive if it is missing.
    """

    def __init__(self, root: str, url: str, md5: str, download: bool = False) -> None:
        archive = os.path.join(root, "pictures.tar.gz")
        if download and not os.path.exists(os.path.join(root, "pictures.pt")):
            os.makedirs(root)
            with urlopen(url) as source, open(archive, "wb") as target:
                while piece := source.read(256):
                    target.write(piece)
                    target.flush()
                    time.sleep(0.02)
            with open(archive, "rb") as file:
                if hashlib.md5(file.read()).hexdigest() != md5:
                    raise RuntimeError("the archive is corrupt")
            with tarfile.open(archive) as file:
                file.extractall(root)
        super().__init__(*torch.load(os.path.join(root, "pictures.pt")))
