"""Settings: what a run is configured with, where it is read from, and the configurations of other tools.

run, training, parallel    every setting, declared once: type, default, sentence, range
settings                   `Config`, which holds them all and reads them from TOML (toml_file) and the command line;
                           names of other tools, what is wrong with names and values, and what is meant
preset                     [model] of another run, of a Hugging Face config.json, and what a model wants otherwise
learning_rate, batch_sizes the rate and the samples of each step
named                      functions and classes of the user's own code
deepspeed                  ds_config.json, read into our settings
"""
