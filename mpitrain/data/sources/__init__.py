"""The inputs `prepare` understands, one file each. Every one turns paths into a `mpitrain.data.writer.Source`."""
