"""Training scripts that were written for one process, run unchanged by several ranks.

A script goes on seeing whole tensors: plain tensors are whole and equal on all ranks, and a batch is a tensor that is
the whole batch to the script and holds this rank's rows of it (`tensors.py`). Operations run on the rows where a rule
says how (`rules.py`, `specials.py`), and on the gathered batch where none does. Therefore, the place of data decides
how fast a script is, and never what it computes.

| file | subject |
|---|---|
| `session.py`, `meetings.py` | meetings of the ranks, which compare what they are about to do, sum and exchange rows |
| `layouts.py`, `rules.py`, `specials.py` | which rows a rank has, and how an operation works on them |
| `tensors.py` | the tensors, and the dispatch of operations |
| `batches.py`, `workers.py` | batches of DataLoaders, and batches that a script cuts itself |
| `files.py`, `seeds.py` | files, printed lines, clocks and random numbers that one process would have |
| `resume.py`, `loops.py`, `loaders.py`, `variables.py`, `outputs.py`, `shares.py` | checkpoints of a script |
| `record.py`, `precision.py` | run folder; bfloat16 |
| `zero.py`, `parameters.py` | sharded states of optimizers, gradients and parameters |
| `checks.py` | comparison of parameters between ranks, and of N ranks with one (`--check`) |
| `kinds.py` | for which library a script was written |
"""
