"""The commit protocol under a scheduler: the production functions over a model store, one store operation at a time.

    turns        actors that take turns: threads, of which one runs
    production   what the production code has around it: no threads of its own, seeded write-ids
    model        the store: objects, tokens, a clock, late requests, stale lists
    contents     what each step of each generation holds
    schedule     who takes how many turns and what goes wrong, drawn from a seed, written as text, made smaller
    actors       ranks, leaders, readers, collectors: the least around `save_rank`, `fence`, `commit`, ...
    invariants   what must hold after every operation
    run          one schedule; random schedules by the thousand

The same schedule gives the same operations in the same order.
"""
