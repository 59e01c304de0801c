"""The staleness sweep: many runs that differ in k, variant and seed, and a verdict on which k is safe.

| file         | what                                                            |
|--------------|-----------------------------------------------------------------|
| settings.py  | the sweep's file                                                |
| plan.py      | its runs, checked to be comparable                              |
| host.py      | what is in a run's folder; cores and GPUs                       |
| locks.py     | several processes in one folder                                 |
| run.py       | processes: start, collect, end                                  |
| row.py       | a run condensed                                                 |
| intervals.py | statistics of a handful of seeds                                |
| verdict.py   | the rule, in numbers and words                                  |
| result.py    | sweep.json; figure.py and page.py show it                       |
| command.py   | the command                                                     |
"""
