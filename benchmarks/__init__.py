"""Benchmarks: every figure of docs/performance.md, measured side by side with peers. `python -m benchmarks --help`.

A benchmark NAME is a module `NAME.py` here or in a folder here with `main(arguments) -> int`; `--help` shows the first
line of its docstring. How one is made:

    def measure(world, options) -> dict:    collective; what rank 0 returns (JSON) is the result of this rank count
    def report(results, options) -> Report: results: {ranks: what measure returned}; tables, targets, panels of a plot
    def main(arguments):
        return run(BenchmarkParser("NAME", "what it measures"), measure, report, arguments)

`run` (runner/jobs.py) does the rest. Started plainly it starts itself under this environment's mpirun once per rank
count of `--ranks`, with a time limit; started under mpirun or srun it runs at that size. It writes BENCH-NAME.json, .md
and .png into `--out`.

Rules:
- Peers run in the same processes and the same loop (`jobs.timed`: A B C A B C …), so that drift hits all
  alike. Ratios are what counts; absolute times stand beside them.
- A repetition's time is from the first rank's start to the last rank's end; what is told is the median over the
  repetitions. The module's docstring says what was in the caches.
- A target is made by `report.judged`: what was wanted, what was measured, whether it was met. One that was missed is
  shown.
- `--quick` ends within seconds: it shows that the benchmark works, not how fast anything is, and judges no target.
- No module-level import of a peer that may be missing; only comm/ imports mpi4py.
"""
