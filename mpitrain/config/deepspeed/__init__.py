"""Reader that converts a DeepSpeed configuration (ds_config.json) into our settings.

    keys         every key of DeepSpeed, sorted by how it is treated, and a collector of errors
    reading      the file as a `DeepSpeedConfig`: a `Config`, and what has no setting of ours; replacement of "auto"

A key with a counterpart in our settings is converted. A key that only tunes DeepSpeed's own machinery, only reports, or
is switched off, is listed in `DeepSpeedConfig.without_effect`. All other keys are errors, reported in one message.
"""

from mpitrain.config.deepspeed.reading import DeepSpeedConfig, looks_like_deepspeed, read_deepspeed, read_json

__all__ = ["DeepSpeedConfig", "looks_like_deepspeed", "read_deepspeed", "read_json"]
