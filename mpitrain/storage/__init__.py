"""What data sets, checkpoints and logs do with files: locks, hashes, folders that are whole or not there at all."""
