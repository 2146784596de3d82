"""The worker's side of a build: lease, run the compiler in a process of its own, check, finish.

    runner (worker, Django)  -(one JSON job on stdin)->  child (compiler, no Django)
                             <-(JSON lines on stdout)-   progress, log, error

A crash or a kill of the child never takes the worker along, and a web process never loads the
compiler. `child` is the only module of the platform that imports `compiler.driver`.
"""
