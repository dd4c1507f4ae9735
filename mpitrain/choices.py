"""Names that settings choose from, each list written once.

The configuration uses them as types. The modules named in the comments implement them, and `tests/test_choices.py`
checks that every name is implemented and every implementation has its name here. To add an algorithm, a model or a
schedule, implement it in its module and add its name here. Nothing of mpitrain is imported, so that the configuration
can be read before torch and MPI are loaded.
"""

from collections.abc import Iterable
from typing import Literal

Model = Literal["gpt", "resnet", "mlp"]  # models.build
Norm = Literal["layernorm", "rmsnorm"]  # models.gpt
Positions = Literal["rotary", "learned"]  # models.gpt
FeedForward = Literal["gelu", "swiglu"]  # models.gpt
RESNET_LAYERS = (18, 34, 50, 101)  # models.resnet
Precision = Literal["fp32", "bf16", "fp16"]  # layers.precision
# decay of the learning rate after warm-up: config.learning_rate
Decay = Literal["constant", "linear", "cosine", "wsd", "inverse-sqrt", "polynomial"]
Cycle = Literal["one-cycle", "range-test"]  # config.learning_rate
Rates = Literal[Decay, Cycle]
Augmentation = Literal["crop", "flip"]  # data.on_device
NoDecay = Literal["vectors", "embeddings", "nothing"]  # trainer.optimizing
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]  # pipe.schedule
DelayedSchedule = Literal["2bw"]  # pipe.schedule; gradients are of weights that are one step old
Mode = Literal["sync", "server", "local"]  # trainer.trainer
Outer = Literal["average", "nesterov"]  # loose.averaging
AllReduce = Literal["mpi", "ring", "tree", "halving", "shared", "staged", "two_level"]  # comm.collectives
DeviceWay = Literal["mpi", "staged", "peer", "nccl"]  # comm.collectives.transports
Compression = Literal["fp16", "bf16", "int8", "int4", "topk", "powersgd"]  # comm.compression


# built-in metrics of held-out samples; users may add their own: models.metrics
Measured = Literal["accuracy", "token_accuracy", "top5_accuracy", "perplexity", "r2", "rmse"]
OfClasses = Literal["f1", "f1_macro", "f1_micro", "precision", "recall", "per_class", "auroc"]


def one_of(names: Iterable[object]) -> str:
    """Return the names as a list in words: a, b or c."""
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last
