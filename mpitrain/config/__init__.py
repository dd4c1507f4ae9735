"""Settings: what a run is configured with, where it is read from, and the configurations of other tools.

run, training, parallel    every setting, declared once: type, default, sentence, range
settings                   `Config`, which holds them all and reads them
toml_file, command_line    where values come from
messages                   what is wrong with them, and what is meant
learning_rate              the rate of each step
deepspeed                  ds_config.json, read into plain values
"""
