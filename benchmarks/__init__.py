"""Benchmarks of mpitrain beside its peers: every figure of docs/performance.md. See `python -m benchmarks --help`.

A benchmark NAME is a module `NAME.py` in this folder or a subfolder that defines `main(arguments) -> int`. `--help`
shows the first line of its docstring. The template of a benchmark:

    def measure(world, options) -> dict:    collective; rank 0 returns the result at this rank count, as JSON values
    def report(results, options) -> Report: results: {ranks: result of measure}; returns tables, targets and plots
    def main(arguments):
        return run(BenchmarkParser("NAME", "description"), measure, report, arguments)

`run` (runner/jobs.py) does the rest. If the benchmark is started without a launcher, it starts itself under this
environment's mpirun, once for each rank count in `--ranks`, with a time limit. Under mpirun or srun it runs with the
given number of ranks. It writes BENCH-NAME.json, .md and .png into the folder `--out`.

Rules:
- Peers run in the same processes and in the same loop as mpitrain (`jobs.timed`: A B C A B C …), so that a drift of the
  machine affects all of them equally. The ratios are the result; absolute times are given beside them.
- The time of a repetition is from the first rank's start to the last rank's end. The report shows the median of all
  repetitions. The module's docstring says which data was in the caches.
- `report.target_of` creates a target: the required figure, the measured one, and whether it was met. Missed targets are
  shown as well.
- `--quick` ends within seconds. It shows that the benchmark works, not how fast anything is, and judges no target.
- A peer that may not be installed is never imported at module level. Only comm/ imports mpi4py.
"""
