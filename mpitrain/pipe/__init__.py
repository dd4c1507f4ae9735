"""Pipeline parallelism: schedules as data, stages of a model, and one runtime for all schedules.

Pure, without MPI and torch: schedule, schedules, passes, simulate, draw. Over MPI: pipeline and what it uses.
"""
