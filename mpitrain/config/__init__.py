"""The settings of a run, the code that reads and checks them, and readers for the configurations of other tools.

run, training, parallel    every setting, declared once: type, default, description, range
settings                   `Config`, which contains all settings and reads them from a TOML file (toml_file) and from
                           the command line; it accepts names of other tools and suggests names for misspelled ones
preset                     values of [model] from another run or from a Hugging Face config.json; defaults by model
learning_rate, batch_sizes the learning rate and the number of samples of each step
named                      functions and classes in the user's own code that a setting names
deepspeed                  ds_config.json, converted to our settings
"""
