"""The axes along which a training is spread over ranks, one file each, and the rules that they share."""
