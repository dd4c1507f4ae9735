"""A DeepSpeed configuration (ds_config.json), read into our settings.

    keys         every key by what becomes of it, and notes of what is wrong
    reading      the file, as a `DeepSpeedConfig`: a `Config`, and what no setting of ours says; what "auto" stands for

What has a counterpart is taken over; what only tunes DeepSpeed's own machinery, only reports, or is switched off, is
named in `DeepSpeedConfig.without_effect`; all the rest is told in one error.
"""

from mpitrain.config.deepspeed.reading import DeepSpeedConfig, looks_like_deepspeed, read_deepspeed, read_json

__all__ = ["DeepSpeedConfig", "looks_like_deepspeed", "read_deepspeed", "read_json"]
