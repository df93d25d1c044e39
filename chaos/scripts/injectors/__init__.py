"""How ranks of `train_faulty.py` fail: one idea a module.

fault      one fault of a job: when it happens, on whom, and the mark that says that it has
injector   one kind of fault, as a value
kinds      all kinds, by their names
standstill a rank that stops, waits or never ends
astray     a rank that leaves the program of collectives that all others follow
custody    what no audit of passes repeats: votes, updates, and what is exchanged
memory     bits that change in memory, and memory that runs out
blocks     blocks of the model that compute wrongly, or take longer
samples    samples that take long, are at fault, or never come
"""
