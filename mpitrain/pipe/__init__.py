"""Pipeline parallelism: schedules as data, the stages of a model, and one executor for all schedules.

`schedule`, `simulate` and `draw` need neither MPI nor torch. `pipeline` and the modules it imports run over MPI.
"""
