"""A DeepSpeed configuration (ds_config.json), read into plain values.

    "auto" is filled in from our settings -> every key is looked at (keys) -> our words (reading, optimizing)

What has a counterpart is taken over; what only tunes DeepSpeed's own machinery, only reports, or is switched off, is
named in `DeepSpeedConfig.without_effect`; all the rest is told in one error. See the "DeepSpeed Configuration JSON"
page of DeepSpeed's documentation, and for "auto" the "DeepSpeed" page of Hugging Face's transformers.
"""

from mpitrain.config.deepspeed.json_file import read_json
from mpitrain.config.deepspeed.reading import DeepSpeedConfig, LossScaling, looks_like_deepspeed, read_deepspeed
from mpitrain.config.learning_rate import WarmUp

__all__ = ["DeepSpeedConfig", "LossScaling", "WarmUp", "looks_like_deepspeed", "read_deepspeed", "read_json"]
